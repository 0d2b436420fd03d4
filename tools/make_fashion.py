"""Make the bundled data set from the files of Fashion-MNIST:  python tools/make_fashion.py FOLDER

FOLDER holds the four gzip files of the data set, as the Debian package dataset-fashion-mnist installs them. The same
images are chosen every time: 400 of each class for training and 100 of each for testing.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

OUT = Path(__file__).parents[1] / "src/selfmask/data/bundled/fashion.npz"
CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
SEED = 0


def read_idx(file: Path) -> NDArray[np.uint8]:
    """An idx file: two zero bytes, the type (8: bytes), the number of axes, their lengths, the values."""
    content = gzip.decompress(file.read_bytes())
    if content[:3] != b"\0\0\x08":
        sys.exit(f"{file} is no idx file of bytes")
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def choose(labels: NDArray[np.uint8], each: int, seed: int) -> NDArray[np.int64]:
    """`each` images of every class, at random, in the order in which they stand in the data set."""
    random = np.random.default_rng(seed)
    return np.sort(np.concatenate([random.permutation(np.flatnonzero(labels == c))[:each] for c in range(10)]))


def main(folder: Path) -> None:
    """Read, choose, write."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for split, prefix, each in (("train", "train", 400), ("test", "t10k", 100)):
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
        chosen = choose(labels, each, SEED)
        arrays[f"{split}_images"] = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")[chosen]
        arrays[f"{split}_labels"] = labels[chosen]
    np.savez_compressed(OUT, classes=np.array(CLASSES), **arrays)
    print(f"{OUT}: {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
