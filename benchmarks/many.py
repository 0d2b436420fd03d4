"""Many masks of one backbone: do `masks pack`, `combine` and `find` do what they are for? docs/masks.md.

    python -m benchmarks.many learn      50 masks by short runs of `adapt`, ten for each of five data sets
    python -m benchmarks.many measure    pack and unpack them, combine them, and look for the right one
    python -m benchmarks.many tables     what came of it

The masks are of selfmask/tiny, in runs/many: of each data set four of all classes, with other seeds, and three each of
the first and of the last five classes. The gate is off, so that every run leaves the mask that its steps led to, good
or bad. With `--whole`, they are 20 masks of runs as long as `fast` has them, with the gate, in runs/many-whole. All
steps continue where they were stopped: a run or a number that is there is not made again. The data sets are those of
tools/small_sets.py, in the folder that SELFMASK_DATA names, and the bundled pictures of clothes.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import lzma
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from selfmask import AdaptConfig, MaskedModel, adapt
from selfmask.backbones import Backbone, load_backbone
from selfmask.commands.combine import combine
from selfmask.commands.find import find
from selfmask.commands.masks import pack_masks, unpack_masks
from selfmask.data import Images, SomeImages, open_images
from selfmask.embedding.vectors import embed
from selfmask.evaluation import knn_accuracy
from selfmask.files import RunFile
from selfmask.memory import keep_memory

BACKBONE, K, BANK, QUERIES = "selfmask/tiny", 20, 500, 300
FROZEN = "frozen"
SETS = {
    "clothes": "selfmask/fashion",
    "mnist": "small-mnist",
    "digits": "small-digits",
    "cifar10": "small-cifar10",
    "fashion": "small-fashion",
}
KIND = {"clothes": "clothes", "fashion": "clothes", "mnist": "digits", "digits": "digits", "cifar10": "photos"}
"""Data sets that show the same things: the first two are both of Fashion-MNIST."""
PARTS = {"all": range(10), "low": range(5), "high": range(5, 10)}
SEEDS = {"all": range(4), "low": range(3), "high": range(3)}
HOWS = (("vote", False), ("vote", True), ("and", False), ("or", False))
"""How masks are combined, and whether statistics are taken from images then."""


def name_of(images: str, part: str, seed: int) -> str:
    return f"{images}-{part}-{seed}"


NAMES = [name_of(images, part, seed) for images in SETS for part in PARTS for seed in SEEDS[part]]
TO_FIND = [name_of(images, *of) for images in SETS for of in (("all", 0), ("all", 1), ("low", 0), ("high", 0))]


@dataclasses.dataclass(frozen=True)
class Runs:
    """Where runs and what was measured on them are kept, how they learn, and which there are."""

    folder: Path
    log: Path
    settings: dict[str, Any]
    names: list[str]

    def mask(self, name: str) -> Path:
        return self.folder / name / RunFile.MASK

    @property
    def learned(self) -> list[str]:
        return [name for name in self.names if (self.folder / name / RunFile.RESULT).exists()]

    def noted(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = json.loads(self.log.read_text()) if self.log.exists() else {}
        return found

    def note(self, kind: str, key: str, value: Any) -> None:
        every = self.noted()
        every.setdefault(kind, {})[key] = value
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n")

    def once(self, kind: str, key: str, make: Callable[[], Any]) -> Any:
        """What was found before, or is found now and kept."""
        if key not in self.noted().get(kind, {}):
            self.note(kind, key, make())
            print(kind, key, self.noted()[kind][key], flush=True)
        return self.noted()[kind][key]


SHORT = Runs(
    Path("runs/many"),
    Path("docs/logs/many.json"),
    {"steps": 24, "batch_size": 32, "most_images": 600, "track": (), "gate": False},
    NAMES,
)
WHOLE = Runs(
    Path("runs/many-whole"),
    Path("docs/logs/many-whole.json"),
    {"batch_size": 32, "most_images": 2000, "track": ()},
    TO_FIND,
)


@cache
def backbone() -> Backbone:
    return load_backbone(BACKBONE)


@cache
def images_of(name: str, part: str, split: str) -> Images:
    images = open_images(SETS[name], split=split)
    assert images.labels is not None
    return SomeImages(images, [i for i, label in enumerate(images.labels) if label in PARTS[part]])


# ---- learning ---------------------------------------------------------------------------------------------------


def learn(runs: Runs) -> None:
    for name in sorted(runs.names, key=lambda name: name not in TO_FIND):
        images, part, seed = name.split("-")
        if name in runs.learned:
            continue
        config = AdaptConfig.preset("fast", seed=int(seed), **runs.settings)
        start, out = time.process_time(), runs.folder / name
        done = adapt(
            copy.deepcopy(backbone().model),
            images_of(images, part, "train"),
            config,
            out=out,
            resume=out.exists(),
            preprocessing=backbone().preprocessing,
            about={"backbone": BACKBONE, "images": SETS[images]},
            report=False,
        )
        runs.note("learned", name, time.process_time() - start)
        runs.note("off", name, 1 - done.result["active"])
        print(f"{name}: active {done.result['active']:.4f}, {done.result['mask_bytes']:,} bytes", flush=True)


# ---- measuring ------------------------------------------------------------------------------------------------------


def accuracy(masked: MaskedModel | None, images: str) -> float:
    """By k-NN, on all classes of a data set; of a mask that is active, or of the frozen backbone."""
    model = backbone().model if masked is None else masked
    vectors, labels = [], []
    for split, count in (("train", BANK), ("test", QUERIES)):
        some = images_of(images, "all", split)
        some = SomeImages(some, range(min(count, len(some))))
        vectors.append(embed(model, some, backbone().preprocessing, batch_size=128, workers=1)[0])
        assert some.labels is not None
        labels.append(torch.tensor(some.labels))
    return knn_accuracy(vectors[0], labels[0], vectors[1], labels[1], k=K)


def loaded(file: Path) -> MaskedModel:
    return MaskedModel.from_pretrained(copy.deepcopy(backbone().model), file).eval()


def knn(runs: Runs, name: str, images: str) -> float:
    def make() -> float:
        return accuracy(None if name == FROZEN else loaded(runs.mask(name)), images)

    return float(runs.once("knn", f"{name} on {images}", make))


def pack(runs: Runs, count: int) -> dict[str, Any]:
    """So many masks, of all data sets in turn, in one file and back."""
    by_turns = sorted(runs.learned, key=lambda name: (name not in TO_FIND, NAMES.index(name) % 10))
    with tempfile.TemporaryDirectory() as place:
        folder, file, again = (Path(place) / name for name in ("masks", "pack", "again"))
        folder.mkdir()
        for name in by_turns[:count]:
            (folder / f"{name}.smn").write_bytes(runs.mask(name).read_bytes())
        times = [time.process_time()]
        done = pack_masks(folder, file)
        times.append(time.process_time())
        unpack_masks(file, again)
        times.append(time.process_time())
        files = sorted(folder.iterdir())
        same = sum((again / each.name).read_bytes() == each.read_bytes() for each in files)
        joined = b"".join(each.read_bytes() for each in files)
    return {
        "files": len(joined),
        "xz": len(lzma.compress(joined, preset=9)),
        "pack": done.bytes,
        "same": same,
        "pack_seconds": times[1] - times[0],
        "unpack_seconds": times[2] - times[1],
    }


def combine_and_measure(runs: Runs, title: str, parts: list[str], images: str, how: str, recalibrate: bool) -> float:
    """The accuracy on a data set of a mask that is made of others."""

    def make() -> float:
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "combined.smn"
            source = images_of(images, "all", "train") if recalibrate else None
            combine([runs.folder / name for name in parts], file, how=how, images=source)  # type: ignore[arg-type]
            return accuracy(loaded(file), images)

    key = f"{title}, {how}{', recalibrated' if recalibrate else ''} on {images}"
    return float(runs.once("combined", key, make))


TOGETHER: dict[str, Callable[[str], list[str]]] = {
    "four of the data set": lambda images: [name for name in TO_FIND if name.startswith(images)],
    "two halves of it": lambda images: [name_of(images, part, 0) for part in ("low", "high")],
    "five data sets": lambda _: [name_of(each, "all", 0) for each in SETS],
}
"""What is combined, for each data set that it is measured on."""


def look(runs: Runs, images: str, part: str, seed: int) -> dict[str, Any]:
    """Have `find` look for a mask, on test images."""
    with tempfile.TemporaryDirectory() as place:
        for name in TO_FIND:
            (Path(place) / f"{name}.smn").write_bytes(runs.mask(name).read_bytes())
        start = time.process_time()
        found = find(Path(place), images_of(images, part, "test"), seed=seed)
    race = found.race
    return {
        "best": race.best.name,
        "helps": race.helps,
        "left": sum(not place.worse for place in race.places),
        "passes": found.passes / found.all_passes,
        "seconds": time.process_time() - start,
        "gains": {place.name: place.gain.mean for place in race.places},
    }


QUERIES_TO_FIND = [(images, part, seed) for images in SETS for part in PARTS for seed in range(1)]


def measure(runs: Runs) -> None:
    for count in (20, 5, 10, 30, 50):
        if count <= len(runs.learned):
            runs.once("pack", str(count), lambda count=count: pack(runs, count))
    for images, part, seed in QUERIES_TO_FIND:
        runs.once("find", f"{images} {part} {seed}", lambda of=(images, part, seed): look(runs, *of))
    for images in SETS:
        for name in (FROZEN, *TO_FIND):
            knn(runs, name, images)
        for title, parts in TOGETHER.items():
            for how, again in HOWS:
                combine_and_measure(runs, title, parts(images), images, how, again)


# ---- tables ---------------------------------------------------------------------------------------------------------


def tables(runs: Runs) -> None:
    found = runs.noted()
    learned, off = found["learned"], found.get("off", {})
    print(f"{len(learned)} masks, learned in {_seconds(learned)}\n")
    for images in SETS if off else ():
        shares = [share for name, share in off.items() if name.startswith(images)]
        print(f"{images}: {', '.join(f'{share:.2%}' for share in shares)} of the weights off")
    print()
    print("| masks | bytes as files | joined, by xz | in a pack | of the files | packed in | unpacked in |")
    print("|---|---|---|---|---|---|---|")
    for count, row in sorted(found["pack"].items(), key=lambda each: int(each[0])):
        assert row["same"] == int(count)
        sizes = f"{row['files']:,} | {row['xz']:,} | {row['pack']:,} | {row['pack'] / row['files']:.1%}"
        print(f"| {count} | {sizes} | {row['pack_seconds']:.1f} s | {row['unpack_seconds']:.1f} s |")
    measured = [images for images in SETS if f"{list(TOGETHER)[-1]}, {HOWS[-1][0]} on {images}" in found["combined"]]
    combined_table(found["knn"], found["combined"], measured)
    find_table(found["knn"], found["find"], measured)


def _seconds(times: dict[str, float]) -> str:
    return f"{sum(times.values()):,.0f} s of one core"


def combined_table(knn: dict[str, float], combined: dict[str, float], sets: list[str]) -> None:
    def cell(value: float, images: str) -> str:
        return f"{100 * (value - knn[f'{FROZEN} on {images}']):+.1f}"

    def row(title: str, values: list[float]) -> None:
        cells = [cell(value, images) for value, images in zip(values, sets, strict=True)]
        gain = mean(100 * (value - knn[f"{FROZEN} on {images}"]) for value, images in zip(values, sets, strict=True))
        print(f"| {title} | {' | '.join(cells)} | {gain:+.1f} |")

    print("\n| | " + " | ".join(sets) + " | mean |\n" + "|---" * (len(sets) + 2) + "|")
    print("| frozen, % | " + " | ".join(f"{100 * knn[f'{FROZEN} on {images}']:.1f}" for images in sets) + " | |")
    for title, parts in TOGETHER.items():
        each = [[knn[f"{name} on {images}"] for name in parts(images)] for images in sets]
        row(f"{title}: mean of the parts", [mean(values) for values in each])
        row(f"{title}: best of the parts", [max(values) for values in each])
        for how, again in HOWS:
            told = f"{how}{', recalibrated' if again else ''}"
            row(f"{title}: {told}", [combined[f"{title}, {told} on {images}"] for images in sets])


def find_table(knn: dict[str, float], found: dict[str, dict[str, Any]], sets: list[str]) -> None:
    """A row for each data set: its searches, and how they ended."""
    heads = ("images of", "searches", "its mask", "one of its kind", "frozen", "helps", "left", "passes", "seconds")
    print("\n| " + " | ".join(heads) + " | k-NN (best, frozen, mean) |")
    print("|---" * 10 + "|")
    names = (FROZEN, *TO_FIND)
    for images in SETS:
        rows = [row for key, row in found.items() if key.split()[0] == images]
        best = [row["best"] for row in rows]
        right = sum(name.split("-")[0] == images for name in best)
        kind = sum(KIND.get(name.split("-")[0]) == KIND[images] for name in best)
        accuracies = "not measured yet"
        if images in sets:
            chosen = mean(knn[f"{name} on {images}"] for name in best)
            top = max(knn[f"{name} on {images}"] for name in names)
            middle = mean(knn[f"{name} on {images}"] for name in TO_FIND)
            rest = (top, knn[f"{FROZEN} on {images}"], middle)
            accuracies = f"{100 * chosen:.1f} ({', '.join(f'{100 * each:.1f}' for each in rest)})"
        cells = [
            images,
            str(len(rows)),
            str(right),
            str(kind),
            str(best.count(FROZEN)),
            str(sum(row["helps"] for row in rows)),
            f"{mean(row['left'] for row in rows):.1f}",
            f"{mean(row['passes'] for row in rows):.0%}",
            f"{mean(row['seconds'] for row in rows):.1f}",
            accuracies,
        ]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("learn", "measure", "tables"))
    parser.add_argument("--whole", action="store_true", help="masks of whole runs, with the gate")
    given = parser.parse_args()
    keep_memory()
    {"learn": learn, "measure": measure, "tables": tables}[given.step](WHOLE if given.whole else SHORT)


if __name__ == "__main__":
    main()
