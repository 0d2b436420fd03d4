"""`python -m benchmarks.million [IMAGES] [--only WAY ...]`: a million tiny images in tars, by processes and engines.

Images are those of CIFAR-10, as JPEG, again and again under other names. All ways write two shards, whose bytes must be
the same. Seconds are those of the clock, of whole commands, from the first import to the last byte, on a machine that
does nothing else; every process has one thread for networks (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

from selfmask.data import open_images

from .streams import alone, show

IMAGES, TAR = 1_000_000, 10_000
SIZE, BATCH, SHARDS = 12, 256, 2
LIMIT = 0.9  # of the images a second that as many plain processes embed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=int, nargs="?", default=IMAGES)
    parser.add_argument("--only", nargs="*", default=WAYS, choices=WAYS, metavar="WAY", help=", ".join(WAYS))
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SELFMASK_CACHE"] = str(Path(folder) / "cache")
        return compare(Path(folder), asked.images, asked.only)


def compare(folder: Path, count: int, only: Sequence[str]) -> int:
    tars = folder / "tars"
    size = write_tars(tars, count)
    print(f"{count:,} images in {len(list(tars.iterdir()))} tars, {size / 1e9:.2f} GB", flush=True)
    rows = [{"tars": which, **alone(listed, str(tars))} for which in ("looked through", "known")]
    show("opening them, seconds of the processor", rows)

    table: list[dict[str, Any]] = []
    sums, usual = dict[str, str](), 0.0
    for name in only:
        way = WAYS[name]
        out = folder / "out"
        with Watch() as watch:
            began = time.monotonic()
            way(tars, out)
            seconds = time.monotonic() - began
        found = {file.name: hashed(file) for file in sorted(out.glob("*.parquet"))}
        sums = sums or found
        rate = count / seconds
        usual = rate if way is two else usual
        table.append(
            {
                "by": name,
                "seconds": seconds,
                "images/s": rate,
                "of two processes": rate / usual if usual else "",
                "MB, largest process": watch.largest,
                "MB, all at once": watch.together,
                "bytes": "the same" if found == sums and len(found) == SHARDS else "OTHERS",
            }
        )
        print(json.dumps(table[-1]), flush=True)
        shutil.rmtree(out)
    show(f"{count:,} images of 32 x 32 pixels, selfmask/tiny at {SIZE} pixels, batches of {BATCH}", table)
    fair = all(row["of two processes"] >= LIMIT for row in table if row["by"].startswith("two jobs"))
    return 0 if fair and all(row["bytes"] == "the same" for row in table) else 1


def write_tars(folder: Path, count: int) -> int:
    """How many bytes they take."""
    pictures = []
    source = open_images("cifar10")
    for number in range(min(len(source), count)):
        buffer = io.BytesIO()
        Image.fromarray(source[number].permute(1, 2, 0).numpy()).save(buffer, "JPEG", quality=90)
        pictures.append(buffer.getvalue())
    folder.mkdir()
    total = 0
    for first in range(0, count, TAR):
        path = folder / f"{first // TAR:05d}.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(first, min(first + TAR, count)):
                data = pictures[number % len(pictures)]
                member = tarfile.TarInfo(f"{number:08d}.jpg")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
                tar.members = []  # type: ignore[attr-defined]
        total += path.stat().st_size
    return total


def listed(where: str) -> dict[str, Any]:
    return {"images": len(open_images(where))}


# ---- ways -----------------------------------------------------------------------------------------------------------


def command(tars: Path, out: Path, *more: str) -> list[str]:
    words = ["embed", "selfmask/tiny", str(tars), "--size", str(SIZE), "--batch-size", str(BATCH), "--out", str(out)]
    return [sys.executable, "-m", "selfmask", *words, *more]


def finish(*processes: subprocess.Popen[bytes]) -> None:
    codes = [process.wait() for process in processes]
    assert not any(codes), f"exit codes {codes}"


def start(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, stdout=subprocess.DEVNULL)


def one(tars: Path, out: Path) -> None:
    finish(start(command(tars, out, "--shard", f"all/{SHARDS}")))


def two(tars: Path, out: Path) -> None:
    finish(*[start(command(tars, out, "--shard", f"{number}/{SHARDS}")) for number in range(1, SHARDS + 1)])


def jobs(tars: Path, out: Path) -> None:
    finish(start(command(tars, out, "--shard", f"all/{SHARDS}", "--launch", "local")))


def ray(tars: Path, out: Path) -> None:
    finish(start(command(tars, out, "--shard", f"all/{SHARDS}", "--launch", "ray")))


def killed(tars: Path, out: Path) -> None:
    """Once half of the second shard is there, its process is killed; then the same command again."""
    launched = start(command(tars, out, "--shard", f"all/{SHARDS}", "--launch", "local"))
    partial = out / "_partial" / f"{SHARDS:05d}-of-{SHARDS:05d}"
    wanted = sum(1 for _ in open_images(tars).names) // SHARDS // 2 // 2048
    while launched.poll() is None and len(list(partial.glob("*.npz"))) < max(1, wanted):
        time.sleep(0.1)
    for process in psutil.Process(launched.pid).children(recursive=True):
        if f"{SHARDS}/{SHARDS}" in process.cmdline() and "--launch" not in process.cmdline():
            process.send_signal(signal.SIGKILL)
            break
    else:
        raise AssertionError("no job to kill")
    assert launched.wait() != 0
    jobs(tars, out)


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "one process": one,
    "two processes": two,
    "two jobs, submitit": jobs,
    "two jobs, Ray": ray,
    "submitit, a job killed half-way": killed,
}


class Watch:
    """The most memory (resident, MB) that a process of ours had, and all together."""

    def __init__(self) -> None:
        self.largest = self.together = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.25):
            sizes = []
            for process in psutil.Process().children(recursive=True):
                try:
                    sizes.append(process.memory_info().rss / 2**20)
                except psutil.Error:  # gone meanwhile
                    continue
            self.largest, self.together = max([self.largest, *sizes]), max(self.together, sum(sizes))


def hashed(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
