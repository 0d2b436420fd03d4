"""The data sets of the paper, and others on this machine: how large they are, who divided them, how to get them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..errors import SelfmaskError
from . import coop, inatloc
from .coop import COOP
from .images import printable
from .named import BUNDLED, data_folder, local_arrays, open_named
from .npz import open_npz
from .partition import set_apart

OWN = "own"
"""Our split, of what nobody divided: a fixed fifth of each class is tested with."""
_NONE = "not stated"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the authors of a data set, and those of its splits, have published."""

    name: str
    classes: int
    licence: str
    page: str
    splits: dict[str, tuple[int, int] | int]
    """Images to learn from and to test with, by whose split; or only all of them. The paper's is the first."""
    torchvision: str = ""
    """The folder in which torchvision keeps it, below the data folder."""


_CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"
_OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
_SUN = "https://vision.princeton.edu/projects/2010/SUN/"
_FOOD = "https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/"
PAPER = (
    Facts("cifar10", 10, _NONE, _CIFAR, {"torchvision": (50_000, 10_000)}, "cifar-10-batches-py"),
    Facts("cifar100", 100, _NONE, _CIFAR, {"torchvision": (50_000, 10_000)}, "cifar-100-python"),
    Facts(
        "dtd",
        47,
        "research purposes",
        f"{_OXFORD}/dtd/",
        {"CoOp": (3_948, 1_692), "torchvision": (3_760, 1_880)},
        "dtd/dtd",
    ),
    Facts(
        "eurosat",
        10,
        "MIT",
        "https://github.com/phelber/EuroSAT",
        {"CoOp": (18_900, 8_100), OWN: (21_600, 5_400)},
        "eurosat/2750",
    ),
    Facts(
        "flowers102",
        102,
        _NONE,
        f"{_OXFORD}/flowers/102/",
        {"CoOp": (5_726, 2_463), "torchvision": (2_040, 6_149)},
        "flowers-102",
    ),
    Facts(
        "oxfordiiitpet",
        37,
        "CC BY-SA 4.0",
        f"{_OXFORD}/pets/",
        {"CoOp": (3_680, 3_669), "torchvision": (3_680, 3_669)},
        "oxford-iiit-pet",
    ),
    Facts("sun397", 397, _NONE, _SUN, {"CoOp": (19_850, 19_850), OWN: 108_754}, "SUN397"),
    Facts("ucf101", 101, _NONE, coop.PAGE, {"CoOp": (9_537, 3_783)}),
    Facts(
        "food101",
        101,
        "scientific fair use",
        _FOOD,
        {"CoOp": (70_700, 30_300), "torchvision": (75_750, 25_250)},
        "food-101",
    ),
    Facts(
        inatloc.FOLDER,
        500,
        "non-commercial research and education",
        inatloc.PAGE,
        {"authors": (137_994, 12_500)},
    ),
)


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """One data set as a run on this machine would use it; if it is not here, as its authors describe it."""

    name: str
    kind: str
    """ "paper", "bundled" or "local"."""
    licence: str
    split: str = "file"
    """Whose: "CoOp", "torchvision", that of its "authors", our "own", or that of the "file"."""
    paper_split: str = ""
    """Whose the paper used; empty if this was none of its data sets."""
    images: int | None = None
    train: int | None = None
    test: int | None = None
    """How many are learned from and tested with, where known."""
    classes: int | None = None
    here: str = "no"
    """ "yes", "no" or "in part"."""
    where: str = ""
    missing: str = ""
    """What is, if it is here in part, and where to put it."""
    get: str = ""
    """How to get it."""


def list_datasets() -> list[DatasetInfo]:
    """Those of the paper, the bundled one, and array files in the data folder. Nothing is downloaded."""
    local = local_arrays()
    return [
        *(_of_the_paper(facts, local.pop(facts.name, None)) for facts in PAPER),
        *(_with_arrays(DatasetInfo(name, "bundled", "MIT"), file) for name, file in BUNDLED.items()),
        *(_with_arrays(DatasetInfo(name, "local", "yours"), file) for name, file in local.items()),
    ]


def _of_the_paper(facts: Facts, arrays: Path | None) -> DatasetInfo:
    """An array file of that name goes before all else, as when the data set is opened."""
    info = DatasetInfo(facts.name, "paper", facts.licence, paper_split=next(iter(facts.splits)), get=_how_to_get(facts))
    if arrays is not None:
        return _with_arrays(info, arrays)
    split = _foreseen(facts)
    info = dataclasses.replace(info, split=split, classes=facts.classes, **_numbers(facts.splits[split]))
    place = next((place for place in _places(facts) if place.exists()), None)
    return info if place is None else _looked_at(info, place)


def _foreseen(facts: Facts) -> str:
    """Whose split a run would use, as things stand."""
    first, *others = facts.splits
    taken = not others or coop.split_file(facts.name, data_folder()).is_file()
    return first if taken else others[0]


def _numbers(counts: tuple[int, int] | int) -> dict[str, Any]:
    if isinstance(counts, int):
        return {"images": counts, "train": None, "test": None}
    return {"images": sum(counts), "train": counts[0], "test": counts[1]}


def _places(facts: Facts) -> list[Path]:
    """Where there is something, if any of it is here."""
    below = [facts.torchvision] if facts.torchvision else []
    if known := COOP.get(facts.name):
        below = [f"{known.folder}/{known.file}", *below, *known.images]
    return [data_folder() / each for each in below or [facts.name]]


def _how_to_get(facts: Facts) -> str:
    """Paths are below the data folder."""
    ways = [f"downloaded when it is first used ({facts.page})"] if facts.torchvision else []
    if known := COOP.get(facts.name):
        ways.append(f"for CoOp's split: {known.folder}/{known.file}, and images in {known.images[0]} ({coop.PAGE})")
    if facts.name == inatloc.FOLDER:
        ways.append(f"iNatLoc.tar.gz and metadata_choe.zip ({facts.page}), extracted in {facts.name}")
    return "; ".join(ways)


def _looked_at(info: DatasetInfo, place: Path) -> DatasetInfo:
    """As a run would find it there."""
    info = dataclasses.replace(info, where=printable(place))
    try:
        train, test = (open_named(info.name, split, fetch=False) for split in ("train", "test"))
        split, classes = train.divided_by, None if train.classes is None else len(train.classes)
        if train.undivided:
            split, (train, test) = OWN, set_apart(train)
    except SelfmaskError as error:
        parts = (error.what, error.expected and f"expected {error.expected}", error.found and f"found {error.found}")
        missing = "; ".join(str(part) for part in parts if part)
        return dataclasses.replace(info, here="in part", missing=missing)
    return dataclasses.replace(info, here="yes", split=split, classes=classes, **_numbers((len(train), len(test))))


def _with_arrays(info: DatasetInfo, file: Path) -> DatasetInfo:
    """By the headers of the arrays alone, which may be larger than memory."""
    info = dataclasses.replace(info, here="yes", where=printable(file))
    try:
        with open_npz(file) as arrays:
            found = {name: arrays.shape(name)[0] for name in arrays.names if name.endswith("_images")}
            classes = arrays.shape("classes")[0] if "classes" in arrays else None
    except Exception as error:  # zip, zlib and numpy raise many kinds on damaged files
        reason = f"it cannot be read: {type(error).__name__}: {error}"[:200]
        return dataclasses.replace(info, here="in part", missing=reason)
    train, test = found.get("train_images"), found.get("test_images", found.get("val_images"))
    return dataclasses.replace(info, images=sum(found.values()), train=train, test=test, classes=classes)
