"""Large and odd sets of images: does `fast` still help, or at least leave things as they are? docs/budget.md.

    python -m benchmarks.odd [NAME ...]        by default all but the large one
    python -m benchmarks.odd tables

Sets are cut out of those of tools/small_sets.py and tools/photo_sets.py, in the folder that SELFMASK_DATA names; the
large one is all of CIFAR-10 (tools/fetch_cifar10.py). Every run is `fast` with the bundled network, and one line of the
log; none is run twice.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from selfmask.commands.outcome import Labelled
from selfmask.data import open_images
from selfmask.memory import keep_memory

from .curve import Pair, read, run, show

LOG = Path("docs/logs/odd.jsonl")
BACKBONE = "selfmask/tiny"
LARGE = "50,000 images (cifar10)"
Arrays = dict[str, NDArray[np.uint8]]
Kind = Callable[[Path], Path]


def arrays(name: str) -> Arrays:
    with np.load(Path(os.environ["SELFMASK_DATA"]) / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def only(name: str, *classes: int, most: int | None = None) -> Kind:
    """Some classes of a set, and so many of their training images at most."""

    def make(folder: Path) -> Path:
        found = arrays(name)
        for split, count in (("train", most), ("test", None)):
            rows = np.flatnonzero(np.isin(found[f"{split}_labels"], classes or range(1000)))[:count]
            for part in ("images", "labels"):
                found[f"{split}_{part}"] = found[f"{split}_{part}"][rows]
        return saved(folder, found)

    return make


def mostly(name: str, label: int, share: float) -> Kind:
    """Training images of which one class has this share, and all others as many as each other."""

    def make(folder: Path) -> Path:
        found = arrays(name)
        labels = found["train_labels"]
        of_class = {each: np.flatnonzero(labels == each) for each in np.unique(labels)}
        few = round(len(of_class[label]) * (1 - share) / share / (len(of_class) - 1))
        rows = np.sort(np.concatenate([of if each == label else of[:few] for each, of in of_class.items()]))
        return saved(folder, found | {key: found[key][rows] for key in ("train_images", "train_labels")})

    return make


def grey(name: str) -> Kind:
    def make(folder: Path) -> Path:
        found = arrays(name)
        for key in ("train_images", "test_images"):
            found[key] = found[key].mean(-1).astype(np.uint8)
        return saved(folder, found)

    return make


def mixed_sizes(name: str) -> Kind:
    """Files of 24 to 96 pixels a side, of any shape between."""

    def make(folder: Path) -> Path:
        found, random = arrays(name), np.random.default_rng(0)
        for split in ("train", "test"):
            pairs = zip(found[f"{split}_images"], found[f"{split}_labels"], strict=True)
            for number, (pixels, label) in enumerate(pairs):
                place = folder / split / str(label)
                place.mkdir(parents=True, exist_ok=True)
                width, height = (int(side) for side in random.integers(24, 97, 2))
                Image.fromarray(pixels).resize((width, height)).save(place / f"{number}.png")
        return folder

    return make


def saved(folder: Path, found: Arrays) -> Path:
    np.savez(folder / "images.npz", **found)
    return folder / "images.npz"


SETS: Mapping[str, Kind] = {
    "300 images (clothes)": only("small-fashion", most=300),
    "one class of 90 % (digits)": mostly("small-mnist", 1, 0.9),
    "look-alikes (3, 5 and 8)": only("small-mnist", 3, 5, 8),
    "look-alikes (shoes)": only("small-fashion", 5, 7, 9),
    "grey photographs": grey("small-imagenette"),
    "mixed sizes (photographs)": mixed_sizes("small-imagenette"),
    LARGE: only("cifar10"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[name for name in SETS if name != LARGE])
    given = parser.parse_args()
    keep_memory()  # as the command line does
    if given.names == ["tables"]:
        show(read(LOG))
        return
    for name in given.names:
        if name in {line["images"] for line in read(LOG)}:
            continue
        with tempfile.TemporaryDirectory() as folder:
            images = str(SETS[name](Path(folder)))
            labelled = Labelled(*(open_images(images, split=split) for split in ("train", "test")))
            result = run(Pair(BACKBONE, images), {}, out=Path(folder) / "run", labelled=labelled).result
        line = {"backbone": BACKBONE, "images": name, "budget": "fast", "seed": 0, "result": result}
        with LOG.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(name, result["kept"], f"{result['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
