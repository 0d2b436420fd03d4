"""What `selfmask datasets` says of data sets, and that it is what a run finds; torchvision's own layouts, in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision.datasets
from scipy.io import savemat

from selfmask.data import open_images
from selfmask.data.catalogue import OWN, PAPER, list_datasets
from selfmask.data.coop import COOP, split_file
from selfmask.data.named import ALIASES, TORCHVISION, known_names
from selfmask.data.partition import open_split, open_to_learn
from selfmask.errors import DataUnavailableError, MalformedDataError
from tests.cli.inside import selfmask

from .copies import coop_copy, inatloc_copy, paint

TEN = ["cifar10", "cifar100", "dtd", "eurosat", "flowers102", "oxfordiiitpet", "sun397", "ucf101", "food101"]
TEN += ["inatloc500"]


def pets(data: Path) -> list[str]:
    names = {"trainval": ["Abyssinian_1", "pug_1", "pug_2"], "test": ["Abyssinian_2", "pug_3"]}
    for part, own in names.items():
        rows = [f"{name} {1 + name.startswith('pug')} 1 1\n" for name in own]
        (data / "oxford-iiit-pet/annotations").mkdir(parents=True, exist_ok=True)
        (data / f"oxford-iiit-pet/annotations/{part}.txt").write_text("".join(rows))
    files = [f"images/{name}.jpg" for own in names.values() for name in own]
    paint(data / "oxford-iiit-pet", *files)
    return [f"oxford-iiit-pet/{file}" for file in files]


def food(data: Path) -> list[str]:
    names = {"train": {"pie": ["pie/1", "pie/2"], "soup": ["soup/1"]}, "test": {"pie": ["pie/3"], "soup": ["soup/2"]}}
    (data / "food-101/meta").mkdir(parents=True)
    for part, own in names.items():
        (data / f"food-101/meta/{part}.json").write_text(json.dumps(own))
    files = [f"images/{name}.jpg" for own in names.values() for each in own.values() for name in each]
    paint(data / "food-101", *files)
    return [f"food-101/{file}" for file in files]


IDS = ([[2, 1]], [[3, 4]], [[5, 6]])


def flowers(data: Path) -> list[str]:
    home = data / "flowers-102"
    files = [f"jpg/image_{number:05d}.jpg" for number in range(1, 7)]
    paint(home, *files)
    savemat(home / "imagelabels.mat", {"labels": np.array([[1, 2, 1, 2, 1, 2]])})
    savemat(
        home / "setid.mat", {part: np.array(own) for part, own in zip(("trnid", "valid", "tstid"), IDS, strict=True)}
    )
    return [f"flowers-102/{file}" for file in files]


def textures(data: Path) -> list[str]:
    files = [f"images/{kind}/{i}.jpg" for kind in ("dots", "grid") for i in range(3)]
    paint(data / "dtd/dtd", *files)
    (data / "dtd/dtd/labels").mkdir()
    for i, part in enumerate(("train", "val", "test")):
        (data / f"dtd/dtd/labels/{part}1.txt").write_text(f"grid/{i}.jpg\ndots/{i}.jpg\n")
    return [f"dtd/dtd/{file}" for file in files]


DIVIDED: dict[str, tuple[Any, int, int]] = {
    "dtd": (textures, 4, 2),
    "flowers102": (flowers, 4, 2),
    "oxfordiiitpet": (pets, 3, 2),
    "food101": (food, 3, 2),
}


def info(name: str) -> Any:
    return next(each for each in list_datasets() if each.name == name)


@pytest.fixture
def any_flowers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision compares the labels of flowers with those it knows; of a small copy, they are others."""
    files = {name: (file, None) for name, (file, _) in torchvision.datasets.Flowers102._file_dict.items()}
    monkeypatch.setattr(torchvision.datasets.Flowers102, "_file_dict", files)


@pytest.mark.usefixtures("any_flowers")
@pytest.mark.parametrize("name", DIVIDED)
def test_the_split_of_torchvision_without_that_of_coop(folder: Path, name: str) -> None:
    make, train, test = DIVIDED[name]
    files = make(folder)
    opened = open_split(name)
    assert (len(opened.train), len(opened.test), opened.divided) == (train, test, True)
    assert open_to_learn(name).note.startswith("the split is torchvision's; the paper used CoOp's")
    told = info(name)
    assert (told.train, told.test, told.images, told.here) == (train, test, train + test, "yes")
    assert (told.split, told.paper_split) == ("torchvision", "CoOp")
    (folder / files[-1]).unlink()
    told = info(name)
    assert told.here == "in part"
    assert f"below {folder}; found no {files[-1]}" in told.missing
    with pytest.raises(DataUnavailableError, match="1 of 2 images are missing"):
        open_split(name)
    coop_copy(folder, name)  # goes before torchvision's
    told = info(name)
    assert (told.train, told.test, told.split, told.here) == (4, 2, "CoOp", "yes")
    assert told.where == str(split_file(name, folder))


def test_lists_of_torchvision_that_lead_out_are_refused(folder: Path) -> None:
    pets(folder)
    paint(folder.parent, "secret_1.jpg")
    (folder / "oxford-iiit-pet/annotations/trainval.txt").write_text("../../../secret_1 1 1 1\n")
    with pytest.raises(MalformedDataError, match="outside"):
        open_images("pets")


def satellites(data: Path) -> None:
    paint(data / "eurosat/2750", *(f"{kind}/{kind}_{i}.jpg" for kind in ("Forest", "River") for i in range(5)))


def scenes(data: Path) -> None:
    paint(data / "SUN397", *(f"{kind[0]}/{kind}/sun_{i}.jpg" for kind in ("river", "abbey") for i in (3, 1, 2, 0, 4)))
    (data / "SUN397/ClassName.txt").write_text("/a/abbey\n/r/river\n")


@pytest.mark.parametrize(("name", "make"), [("eurosat", satellites), ("sun397", scenes)])
def test_what_torchvision_does_not_divide(folder: Path, name: str, make: Any) -> None:
    make(folder)
    train, test, divided = open_split(name)
    assert (len(train), len(test), divided) == (8, 2, False)
    assert open_images(name).labels == [0] * 5 + [1] * 5  # in one order, whatever that of the file system
    assert "paper used CoOp's" in open_to_learn(name).note
    told = info(name)
    assert (told.train, told.test, told.split, told.paper_split, told.here) == (8, 2, OWN, "CoOp", "yes")
    coop_copy(folder, name)
    assert (info(name).split, info(name).train) == ("CoOp", 4)


def test_nothing_is_here(folder: Path) -> None:
    found = list_datasets()
    assert [each.name for each in found] == [*TEN, "selfmask/fashion"]
    for each, facts in zip(found, PAPER, strict=False):
        assert (each.here, each.where, each.missing) == ("no", "", "")
        assert (each.classes, each.licence) == (facts.classes, facts.licence)
        assert each.get
        assert each.images
        assert each.train is None or each.images == each.train + (each.test or 0)
        assert each.paper_split == ("CoOp" if each.name in COOP else each.split)
    assert not list(folder.iterdir())  # nor was anything fetched
    assert {*TEN, *ALIASES} <= set(known_names())
    assert [facts.name for facts in PAPER if facts.torchvision] == [name for name in TEN if name in TORCHVISION]


def test_published_numbers_add_up() -> None:
    """By either split they are all images of the data set, except where one leaves some out."""
    for facts in PAPER:
        totals = {sum(counts) if isinstance(counts, tuple) else counts for counts in facts.splits.values()}
        assert len(totals) == 1 or facts.name in ("dtd", "sun397"), facts.name
    numbers = {facts.name: facts.splits for facts in PAPER}
    assert numbers["dtd"] == {"CoOp": (2_820 + 1_128, 1_692), "torchvision": (1_880 + 1_880, 1_880)}
    assert numbers["flowers102"] == {"CoOp": (4_093 + 1_633, 2_463), "torchvision": (1_020 + 1_020, 6_149)}
    assert numbers["ucf101"] == {"CoOp": (7_639 + 1_898, 3_783)}


def test_the_table_of_the_docs_is_what_is_listed(folder: Path) -> None:
    def cell(counts: tuple[int, int] | int) -> str:
        return f"{counts:,} in all" if isinstance(counts, int) else ", ".join(f"{each:,}" for each in counts)

    page = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text()
    for facts in PAPER:
        splits = dict(facts.splits)
        coop = cell(splits.pop("CoOp")) if "CoOp" in splits else ""
        other = "".join(f"{cell(counts)} ({whose})" for whose, counts in splits.items())
        cells = [f"`{facts.name}`", str(facts.classes), other, coop, facts.licence]
        assert f"| {' | '.join(cells)} |".replace("|  |", "| |") in page
        if facts.name in COOP:
            places = " or ".join(f"`{place}/`" for place in COOP[facts.name].images)
            assert f"| `{COOP[facts.name].folder}/{COOP[facts.name].file}` | {places}" in page


def test_array_files_are_listed_by_their_headers(folder: Path) -> None:
    pixels = np.zeros((6, 4, 4), np.uint8)
    np.savez(folder / "cifar10.npz", train_images=pixels, test_images=pixels[:2])
    np.savez(folder / "mine.npz", train_images=pixels, classes=np.array(["a", "b"]))
    (folder / "broken.npz").write_bytes(b"no zip")
    told = info("cifar10")
    assert (told.train, told.test, told.split, told.kind, told.here) == (6, 2, "file", "paper", "yes")
    assert told.where == str(folder / "cifar10.npz")
    told = info("mine")
    assert (told.train, told.test, told.classes, told.kind, told.licence) == (6, None, 2, "local", "yours")
    assert info("broken").here == "in part"
    told = info("selfmask/fashion")
    assert (told.train, told.test, told.classes, told.kind, told.licence) == (4000, 1000, 10, "bundled", "MIT")


def test_the_command(folder: Path) -> None:
    coop_copy(folder, "ucf101")
    coop_copy(folder, "flowers102")
    inatloc_copy(folder)
    (folder / "oxford_flowers/jpg/dots/1.jpg").unlink()
    done = selfmask("datasets")
    assert done.returncode == 0, done.stderr
    for name in (*TEN, "selfmask/fashion", "mnist", str(folder)):
        assert name in done.stdout
    part = next(line for line in done.stdout.splitlines() if "is here in part" in line)
    assert part.startswith("flowers102")
    assert "1 of 6 images are missing" in part
    assert str(folder / "oxford_flowers/jpg") in part
    rows = json.loads(selfmask("datasets", "--json").stdout)
    here = {row["name"]: row["here"] for row in rows if row["kind"] == "paper"}
    assert here == dict.fromkeys(TEN, "no") | {"ucf101": "yes", "inatloc500": "yes", "flowers102": "in part"}
    assert selfmask("embed", "selfmask/tiny", "flowers").returncode == 2


def test_a_run_says_whose_split_it_uses(folder: Path) -> None:
    coop_copy(folder, "ucf101")
    done = selfmask("evaluate", "selfmask/tiny", "--data", "ucf101", "--protocol", "knn", "--no-cache")
    assert done.returncode == 0, done.stderr
    assert "the split is CoOp's, as in the paper" in done.stdout


def test_help_teaches() -> None:
    shown = " ".join(selfmask("datasets", "--help").stdout.replace("│", " ").split())
    for words in ("SELFMASK_DATA", "train and val to learn from, test to test with", "Nothing is downloaded", "--json"):
        assert words in shown
