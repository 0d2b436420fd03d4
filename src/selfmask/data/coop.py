"""The splits of CoOp (Zhou et al., 2022), by which the paper divided its data sets, in CoOp's layout on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .. import checked
from ..errors import DataUnavailableError, MalformedDataError
from .images import printable
from .listed import check_whole, once, relative
from .sources import FileImages

PAGE = "https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md"
_LARGEST = 16 << 20  # bytes of a split; the longest names 101,000 images in about a third of that
_MOST = 1_000_000  # images of a part
_FORM = '{"train": [[path, label, class name], ...], "val": [...], "test": [...]}'
_Row = tuple[str, int, str]


@dataclasses.dataclass(frozen=True)
class CoopSplit:
    """Where CoOp keeps a data set, below the data folder."""

    folder: str
    file: str
    """The split, in that folder."""
    images: tuple[str, ...]
    """Folders of the images: CoOp's, and torchvision's, so that a copy which that has fetched will do."""


COOP = {
    "dtd": CoopSplit("dtd", "split_zhou_DescribableTextures.json", ("dtd/images", "dtd/dtd/images")),
    "eurosat": CoopSplit("eurosat", "split_zhou_EuroSAT.json", ("eurosat/2750",)),
    "flowers102": CoopSplit(
        "oxford_flowers", "split_zhou_OxfordFlowers.json", ("oxford_flowers/jpg", "flowers-102/jpg")
    ),
    "oxfordiiitpet": CoopSplit(
        "oxford_pets", "split_zhou_OxfordPets.json", ("oxford_pets/images", "oxford-iiit-pet/images")
    ),
    "sun397": CoopSplit("sun397", "split_zhou_SUN397.json", ("sun397/SUN397", "SUN397")),
    "ucf101": CoopSplit("ucf101", "split_zhou_UCF101.json", ("ucf101/UCF-101-midframes",)),
    "food101": CoopSplit("food-101", "split_zhou_Food101.json", ("food-101/images",)),
}


def split_file(name: str, data: Path) -> Path:
    return data / COOP[name].folder / COOP[name].file


def open_coop(name: str, split: str, data: Path) -> FileImages:
    """Images of one part. As the paper's code did: train and val are learned from, test is tested with."""
    file = split_file(name, data)
    places = [data / images for images in COOP[name].images]
    root = next((place for place in places if place.is_dir()), places[0])
    if not file.is_file() or not root.is_dir():
        raise DataUnavailableError(
            f"the data set {name} is not on this machine",
            expected=f"the split {printable(file)} and the folder of images {printable(root)}",
            found="not the images" if file.is_file() else "not the split" if root.is_dir() else "neither",
            todo=f"get both by way of {PAGE}, or set SELFMASK_DATA to the folder that contains {COOP[name].folder}",
        )
    try:
        train, test, classes = _read(file)
        check_whole(name, root, [path for path, *_ in (*train, *test)], data)
    except (OSError, ValueError) as error:
        raise MalformedDataError(
            f"cannot use the split {printable(file)}",
            expected=_FORM,
            found=getattr(error, "strerror", None) or error,
            todo=f"get it again by way of {PAGE}",
        ) from error
    rows = train if split == "train" else test
    files = [f"{root}/{path}" for path, *_ in rows]
    return FileImages(files, [path for path, *_ in rows], [label for _, label, _ in rows], classes)


def _read(file: Path) -> tuple[list[_Row], list[_Row], list[str]]:
    """What is learned from, what is tested with, and the names of the classes."""
    fields = checked.mapping(checked.document(checked.content(file, most=_LARGEST), most=_LARGEST))
    train, val, test = (
        checked.items(checked.member(fields, part), _row, most=_MOST) for part in ("train", "val", "test")
    )
    everything = (*train, *val, *test)
    if not train or not test:
        raise ValueError("no images to learn from, or none to test with")
    once(path for path, *_ in everything)
    names: dict[int, str] = {}
    for _, label, name in everything:
        if names.setdefault(label, name) != name:
            raise ValueError(f"label {label} is both {names[label]!r} and {name!r}")
    if sorted(names) != list(range(len(names))):
        raise ValueError(f"labels from 0 to {len(names) - 1} expected, found one up to {max(names)}")
    if len(set(names.values())) < len(names):
        raise ValueError("two labels have the same class name")
    return [*train, *val], list(test), [names[label] for label in range(len(names))]


def _row(value: object) -> _Row:
    cells = checked.items(value, lambda cell: cell, most=3)
    if len(cells) != 3:
        raise ValueError(f"a path, a label and a class name expected, found {len(cells)} values")
    name = checked.printable(cells[2], most=200)
    if not name.strip() or "\n" in name:
        raise ValueError(f"a class name expected, found {name!r}")
    return relative(cells[0]), checked.count(cells[1], most=_MOST), name
