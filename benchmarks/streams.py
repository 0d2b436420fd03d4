"""`python -m benchmarks.streams names|embed|adapt|decoded|large`: what shards, long lists of names and the disk cost.

Seconds are those of the processor, so that a machine that does other things, too, does not count.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_sample_images

NAMES = 10_000_000
IMAGES, TAR = 4_000, 500
ADAPTED, STEPS, ROUNDS = 1_000, 20, 5
PHOTOS, SIDE = 120, 448
MANY, DIFFERENT, LAPTOP = 20_000, 100, 4 << 30  # photos, of which so many differ; memory that a laptop would give them
console = Console(width=150)


def main() -> int:
    measures = {"names": names, "embed": embed, "adapt": adapt, "decoded": decoded, "large": large}
    chosen = sys.argv[1:] or list(measures)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SELFMASK_CACHE"] = str(Path(folder) / "cache")
        for name in chosen:
            measures[name](Path(folder))
    return 0


def alone(function: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
    """What it returns, in a process of its own, with seconds and peak memory (MB, and above that of the imports)."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_child, args=(there, function, arguments))
    process.start()
    there.close()
    found: dict[str, Any] = here.recv()
    process.join()
    return found


def _child(pipe: Any, function: Callable[..., dict[str, Any]], arguments: tuple[object, ...]) -> None:
    import selfmask.commands.opening
    import selfmask.data  # noqa: F401 - before the clock starts

    before, start = _peak(), time.process_time()
    found = function(*arguments)
    pipe.send({"seconds": time.process_time() - start, **found, "MB": _peak(), "MB of imports": before})


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(title: str, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(_text(row.get(column, "")) for column in columns))
    console.print(table)


def _text(value: object) -> str:
    if isinstance(value, float) and value < 100:
        return f"{value:,.3g}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


# ---- names --------------------------------------------------------------------------------------------------------


def names(folder: Path) -> None:
    """Ten million names from a scandir that makes them up, and a hundredth of that as real files; old: Python lists."""
    real = folder / "real"
    real.mkdir()
    for number in range(NAMES // 100):
        (real / f"{number * 7919 % NAMES:08d}.jpg").touch()
    rows = [
        {"what": "made up, 10 folders", "names": NAMES, **alone(listed, str(folder / "made-up"), NAMES)},
        {"what": "real files, 1 folder", "names": NAMES // 100, **alone(listed, str(real), 0)},
        {"what": "made up, as lists of text", "names": NAMES // 10, **alone(as_lists, NAMES // 10)},
    ]
    for row in rows:
        row["bytes a name"] = (row["MB"] - row["MB of imports"]) * 2**20 / row["names"]
    show("listing a folder", rows)


class _Entry:
    """What os.scandir gives, as far as it is asked."""

    def __init__(self, path: str, name: str, folder: bool) -> None:
        self.path, self.name, self._folder = f"{path}/{name}", name, folder

    def is_dir(self) -> bool:
        return self._folder

    def is_symlink(self) -> bool:
        return False


def listed(root: str, made_up: int) -> dict[str, Any]:
    from selfmask.data import open_images

    if made_up:
        Path(root).mkdir()
        for each in range(10):
            (Path(root) / f"part-{each}").mkdir()

        @contextmanager
        def scandir(path: Any) -> Iterator[Iterator[_Entry]]:
            own = str(path)
            if own == root:
                yield iter([_Entry(own, f"part-{each}", True) for each in range(10)])
            else:  # in the order of a hash table, as file systems have it
                count = made_up // 10
                yield (_Entry(own, f"{number * 7919 % count:08d}.jpg", False) for number in range(count))

        os.scandir = scandir  # type: ignore[assignment]
    images = open_images(root)
    assert images.names[0] < images.names[len(images) - 1]
    return {"listed": len(images)}


def as_lists(count: int) -> dict[str, Any]:
    parts = sorted((f"part-{number % 10}", f"{number * 7919 % count:08d}.jpg") for number in range(count))
    files, texts = ["/photos/" + "/".join(each) for each in parts], ["/".join(each) for each in parts]
    return {"listed": len(files) + len(texts) - len(parts)}


# ---- embedding ----------------------------------------------------------------------------------------------------


def embed(folder: Path) -> None:
    """Tiny images from a folder, from tars, from parquet; in one file, and in shards."""
    write_tiny(folder / "tiny", IMAGES)
    sources = {"folder": "tiny/photos", "tars": "tiny/tars", "parquet": "tiny/parquet"}
    rows = []
    for name, where in sources.items():
        for out in (f"{name}.parquet", *([f"{name}-shards"] if name == "tars" else [])):
            found = alone(embedded, str(folder / where), str(folder / out))
            rows.append({"from": name, "to": "4 shards" if "shards" in out else "one file", **found})
    show(f"embedding {IMAGES:,} images of 32 x 32 pixels with selfmask/tiny, one core", rows)


def embedded(where: str, out: str) -> dict[str, Any]:
    import torch

    from selfmask.commands.opening import load_embedder
    from selfmask.data import open_images
    from selfmask.embedding.features import write_features
    from selfmask.embedding.shards import Shards, write_shards

    torch.set_num_threads(1)
    embedder = load_embedder("selfmask/tiny")
    start = time.process_time()
    images = open_images(where)
    opened = time.process_time() - start
    if out.endswith(".parquet"):
        write_features(Path(out), embedder, images)
    else:
        write_shards(Path(out), Shards.named("all/4"), embedder, images)
    seconds = time.process_time() - start
    size = sum(
        file.stat().st_size for file in ([Path(out)] if out.endswith(".parquet") else Path(out).glob("*.parquet"))
    )
    return {
        "seconds": seconds,
        "opened in": opened,
        "images/s": len(images) / seconds,
        "bytes a vector": size / len(images),
    }


def write_tiny(folder: Path, count: int) -> None:
    """The same images three times."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in ("photos", "tars", "parquet"):
        (folder / name).mkdir(parents=True)
    random = np.random.default_rng(0)
    for first in range(0, count, TAR):
        with tarfile.open(folder / "tars" / f"{first // TAR:05d}.tar", "w") as tar:
            own: dict[str, list[Any]] = {"name": [], "image": []}
            for number in range(first, min(first + TAR, count)):
                name, data = f"{number:08d}.jpg", jpeg(random.integers(0, 256, (8, 8, 3), np.uint8), 32)
                (folder / "photos" / name).write_bytes(data)
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
                own["name"].append(name)
                own["image"].append(data)
        pq.write_table(pa.table(own), folder / "parquet" / f"{first // TAR:05d}.parquet", row_group_size=500)


def jpeg(pixels: np.ndarray[Any, Any], side: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


# ---- adapting -----------------------------------------------------------------------------------------------------


def adapt(folder: Path) -> None:
    """Whole runs, in turn: images are opened, hashed, decoded and learned from."""
    import datasets

    write_tiny(folder / "adapted", ADAPTED)
    datasets.disable_progress_bars()
    pictures = [file.read_bytes() for file in sorted((folder / "adapted" / "photos").iterdir())]
    features = datasets.Features({"image": datasets.Image()})
    rows = {"image": [{"bytes": data, "path": None} for data in pictures]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder / "adapted" / "saved"))
    sources = {"folder": "photos", "tars": "tars", "parquet": "parquet", "Hugging Face": "saved"}
    seconds: dict[str, list[float]] = {name: [] for name in sources}
    for turn in range(ROUNDS):
        for name in list(sources)[:: 1 if turn % 2 else -1]:
            seconds[name].append(adapted(str(folder / "adapted" / sources[name]))["seconds"])
    ratios = {name: [a / b for a, b in zip(each, seconds["folder"], strict=True)] for name, each in seconds.items()}
    table = [
        {"from": name, "seconds": statistics.median(each), "of the folder": statistics.median(ratios[name])}
        for name, each in seconds.items()
    ]
    show(f"selfmask adapt, {STEPS} steps on {ADAPTED:,} images, median of {ROUNDS}", table)


def adapted(where: str) -> dict[str, Any]:
    import torch

    import selfmask
    from selfmask import AdaptConfig
    from selfmask.backbones import load_backbone

    torch.set_num_threads(1)
    loaded = load_backbone("selfmask/tiny")
    start = time.process_time()
    with tempfile.TemporaryDirectory() as out:
        settings = AdaptConfig.preset("fast", size=32, steps=STEPS)
        selfmask.adapt(loaded.model, where, settings, out=out, preprocessing=loaded.preprocessing, report=False)
    return {"seconds": time.process_time() - start}


# ---- decoded ------------------------------------------------------------------------------------------------------


def photo(number: int) -> Image.Image:
    """One of two real photos, turned a little."""
    return Image.fromarray(load_sample_images().images[number % 2]).rotate(number % 7, expand=True).resize((1280, 853))


def decoded(folder: Path) -> None:
    """Photos that do not fit in the memory allowed: decoded at every step, or once for all runs."""
    (folder / "photos").mkdir()
    for number in range(PHOTOS):
        photo(number).save(folder / "photos" / f"{number:05d}.jpg", quality=90)
    rows = [
        {"store": name, **alone(read_through, str(folder / "photos"), name)}
        for name in ("decoded when asked for", "kept on disk, first run", "kept on disk, later runs", "in memory")
    ]
    show(f"{PHOTOS:,} photos of 1280 x 853, at {SIDE} pixels, one pass in random order, one thread", rows)
    size = sum(file.stat().st_size for file in (folder / "cache" / "images").iterdir())
    console.print(
        json.dumps({"bytes an image": size // PHOTOS, "20,000 such photos, GB": round(size / PHOTOS * 20_000 / 1e9, 1)})
    )
    shutil.rmtree(folder / "cache")


def large(folder: Path) -> None:
    """As many photos as a laptop has no memory for: 100 of them, each under 200 names."""
    (folder / "large").mkdir()
    for number in range(MANY):
        path = folder / "large" / f"{number:05d}.jpg"
        if number < DIFFERENT:
            photo(number).save(path, quality=90)
        else:
            path.hardlink_to(folder / "large" / f"{number % DIFFERENT:05d}.jpg")
    rows = [
        {"store": name, **alone(read_through, str(folder / "large"), name, LAPTOP)}
        for name in ("kept on disk, first run", "kept on disk, later runs")
    ]
    size = sum(file.stat().st_size for file in (folder / "cache" / "images").iterdir())
    show(f"{MANY:,} photos at {SIDE} pixels, {size / 1e9:.1f} GB decoded; {LAPTOP >> 30} GiB of memory for them", rows)
    shutil.rmtree(folder / "cache")


def _own_memory() -> float:
    """MB that this process holds now, without pages of files, which the system takes back when it wants to."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


def read_through(where: str, how: str, memory: int = 50 << 20) -> dict[str, Any]:
    import torch

    from selfmask.data import ImageStore, open_images
    from selfmask.data.identity import Unchanged

    torch.set_num_threads(1)
    images = open_images(where)
    start, own = time.process_time(), list[float]()
    same = Unchanged(images) if "kept" in how else None
    given: dict[str, Any] = {"content": same.content, "holds": same.holds} if same else {}
    given |= {"memory": None if "memory" in how else memory, "progress": lambda *_: own.append(_own_memory())}
    store = ImageStore(images, side=SIDE, workers=1, **given)
    opened = time.process_time() - start
    order = torch.randperm(len(store), generator=torch.Generator().manual_seed(0)).tolist()
    start = time.process_time()
    for first in range(0, len(order), 64):
        store.batch(order[first : first + 64])
        own.append(_own_memory())
    needed = (time.process_time() - start) / len(order) * 1000
    return {"seconds before": opened, "ms an image": needed, "MB of its own": max(own)}


if __name__ == "__main__":
    sys.exit(main())
