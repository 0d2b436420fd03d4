"""Make small data sets of folders of images, one folder a class:  python -m tools.photo_sets OUT FOLDER NAME=FOLDER ...

The shorter side of each image is scaled to 64 pixels and the middle is cut out. At most 2,000 images are for training
and 1,000, or a third, for testing, chosen at random, the same every time. With NAME=emoji=FILE, the images are those of
the npm package emoji-datasource-twitter (its .tgz file), and their categories are the classes. With NAME=noise=COUNT,
every pixel is drawn at random: images that there is nothing to learn from. Point SELFMASK_DATA to OUT, and the sets
are known as small-NAME.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE, TRAIN, TEST, SEED = 64, 2000, 1000, 0


def squared(image: Image.Image) -> NDArray[np.uint8]:
    side = min(image.size)
    left, top = ((length - side) // 2 for length in image.size)
    image = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
    return np.asarray(image)


def of_folder(folder: Path, random: np.random.Generator) -> tuple[NDArray[np.uint8], list[str]]:
    """Some images of a folder, in random order: all there may be many more than are wanted."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in {".jpg", ".jpeg", ".png"})
    chosen = [files[place] for place in random.permutation(len(files))[: TRAIN + TEST]]
    return np.stack([squared(Image.open(file)) for file in chosen]), [file.parent.name for file in chosen]


def emoji(archive: Path) -> Iterator[tuple[NDArray[np.uint8], str]]:
    with tarfile.open(archive) as package:
        about = package.extractfile("package/emoji.json")
        assert about is not None
        for entry in json.load(about):
            try:
                file = package.extractfile(f"package/img/twitter/64/{entry['image']}")
            except KeyError:
                continue
            assert file is not None
            picture = Image.open(io.BytesIO(file.read())).convert("RGBA")
            yield squared(Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)), entry["category"]


def make(out: Path, name: str, source: str) -> None:
    random = np.random.default_rng(SEED)
    kind, _, where = source.partition("=")
    if kind == "noise":
        images = random.integers(0, 256, (int(where), SIDE, SIDE, 3), np.uint8)
        classes = [str(place % 10) for place in range(len(images))]
    elif kind == "emoji":
        pairs = list(emoji(Path(where)))
        order = random.permutation(len(pairs))[: TRAIN + TEST]
        images, classes = np.stack([pairs[place][0] for place in order]), [pairs[place][1] for place in order]
    else:
        images, classes = of_folder(Path(source), random)
    labels = np.unique(classes, return_inverse=True)[1].astype(np.int64)
    count = min(TEST, len(images) // 3)
    np.savez_compressed(
        out / f"small-{name}.npz",
        train_images=images[count:],
        train_labels=labels[count:],
        test_images=images[:count],
        test_labels=labels[:count],
    )
    print(f"small-{name}: {len(images) - count} and {count} images, {labels.max() + 1} classes", flush=True)


if __name__ == "__main__":
    for part in sys.argv[2:]:
        make(Path(sys.argv[1]), *part.split("=", 1))
