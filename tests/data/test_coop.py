"""CoOp's splits and iNatLoc500, on small copies in their own layouts; and splits that were made to mislead."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from selfmask.data import coop, open_images
from selfmask.data.coop import COOP, split_file
from selfmask.data.partition import open_labelled, open_split, open_to_learn
from selfmask.data.sources import FileImages
from selfmask.errors import DataError, DataUnavailableError, MalformedDataError
from tests.fuzzing.mutations import edit_json, mangle

from .copies import ROWS, coop_copy, inatloc_copy, paint


@pytest.mark.parametrize("name", COOP)
def test_train_and_val_are_learned_from_and_test_is_tested_with(folder: Path, name: str) -> None:
    coop_copy(folder, name)
    train, test, divided = open_split(name)
    assert divided
    assert train.names == ["dots/1.jpg", "grid/1.jpg", "dots/2.jpg", "grid/2.jpg"]
    assert test.names == ["grid/3.jpg", "dots/3.jpg"]
    assert (train.labels, test.labels) == ([0, 1, 0, 1], [1, 0])
    assert train.classes == test.classes == ["dotted", "a grid"]
    assert [int(image[0, 0, 0]) for image in train] == [0, 1, 2, 3]  # each image is the one that was meant
    assert open_images(name, split="val").names == test.names  # val is learned from, so it cannot be tested with
    assert (train.divided_by, test.divided_by) == ("CoOp", "CoOp")
    assert open_to_learn(name).note.startswith("the split is CoOp's, as in the paper; the test split is left")
    assert open_labelled(name)[0].note == "the split is CoOp's, as in the paper"


@pytest.mark.parametrize(("short", "name"), [("flowers", "flowers102"), ("Pets", "oxfordiiitpet")])
def test_short_names(folder: Path, short: str, name: str) -> None:
    coop_copy(folder, name)
    assert open_images(short).names == open_images(name).names


@pytest.mark.parametrize("name", [name for name in COOP if len(COOP[name].images) > 1])
def test_a_copy_that_torchvision_has_fetched_will_do(folder: Path, name: str) -> None:
    coop_copy(folder, name, images=1)
    assert len(open_images(name)) == 4
    coop_copy(folder, name)
    assert str(folder / COOP[name].images[0]) in open_images(name).files[0]  # type: ignore[attr-defined]


def changed(part: str, number: int, cell: int, value: Any) -> dict[str, Any]:
    rows = copy.deepcopy(ROWS)
    rows[part][number][cell] = value
    return rows


HOSTILE: dict[str, Any] = {
    "absolute": changed("train", 0, 0, "/etc/passwd"),
    "above": changed("test", 0, 0, "../../secret.jpg"),
    "above, later": changed("val", 0, 0, "dots/../../../secret.jpg"),
    "above, as Windows has it": changed("val", 0, 0, "dots\\..\\..\\secret.jpg"),
    "drive": changed("train", 1, 0, "C:\\secret.jpg"),
    "share": changed("train", 1, 0, "\\\\host\\share\\x.jpg"),
    "zero byte": changed("train", 0, 0, "dots/1.jpg\0.txt"),
    "no path": changed("train", 0, 0, ""),
    "the folder itself": changed("train", 0, 0, "."),
    "long path": changed("train", 0, 0, "x" * 5000),
    "number as path": changed("train", 0, 0, 1),
    "half a character": changed("train", 0, 0, "\ud800.jpg"),
    "negative label": changed("train", 0, 1, -1),
    "label out of range": changed("train", 0, 1, 7),
    "huge label": changed("train", 0, 1, 10**30),
    "flag as label": changed("train", 0, 1, True),
    "text as label": changed("train", 0, 1, "0"),
    "fraction as label": changed("train", 0, 1, 0.5),
    "no name": changed("train", 0, 2, " "),
    "order to the terminal as name": changed("train", 0, 2, "\x1b[2J"),
    "two names of a label": changed("train", 0, 2, "striped"),
    "two labels of a name": changed("val", 0, 2, "dotted") | {"train": ROWS["train"][::2], "test": ROWS["test"][1:]},
    "twice in one part": changed("train", 2, 0, "dots/1.jpg"),
    "in two parts": changed("test", 0, 0, "grid/1.jpg"),
    "in two parts, otherwise written": changed("test", 0, 0, "grid/.//1.jpg"),
    "row too short": changed("train", 0, 0, "x") | {"val": [["grid/2.jpg", 1]]},
    "row too long": {**ROWS, "val": [["grid/2.jpg", 1, "a grid", 0]]},
    "row that is none": {**ROWS, "val": [{"path": "grid/2.jpg"}]},
    "part that is none": {**ROWS, "val": {"0": ["grid/2.jpg", 1, "a grid"]}},
    "no train": {**ROWS, "train": []},
    "no test": {**ROWS, "test": []},
    "no val": {part: rows for part, rows in ROWS.items() if part != "val"},
    "list": [ROWS],
    "nothing": "",
    "no JSON": "{'train': []}",
    "not a number": json.dumps(changed("train", 0, 1, float("nan"))),
    "key twice": json.dumps(ROWS)[:-1] + ', "test": []}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_splits_are_refused(folder: Path, case: str) -> None:
    coop_copy(folder, "ucf101", HOSTILE[case])
    paint(folder.parent, "secret.jpg", "data/secret.jpg")
    with pytest.raises(MalformedDataError) as caught:
        open_images("ucf101")
    assert "split_zhou_UCF101.json" in str(caught.value)
    assert coop.PAGE in str(caught.value.todo)


def test_a_huge_split_is_refused_before_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = coop_copy(folder, "ucf101")
    with file.open("r+") as stream:
        stream.truncate(1 << 40)  # of which the disk holds nothing
    with pytest.raises(MalformedDataError, match="larger than"):
        open_images("ucf101")
    monkeypatch.setattr(coop, "_MOST", 2)
    file.write_text(json.dumps(ROWS))
    with pytest.raises(MalformedDataError, match="at most 2 items"):
        open_images("ucf101")


def test_links_may_not_lead_out_of_the_data(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = paint(tmp_path_factory.mktemp("elsewhere"), "1.jpg", "2.jpg", "3.jpg")
    coop_copy(folder, "ucf101")
    images = folder / COOP["ucf101"].images[0]
    (images / "dots/1.jpg").unlink()
    (images / "dots/1.jpg").symlink_to(elsewhere / "1.jpg")
    with pytest.raises(MalformedDataError, match="outside the folder of the images"):
        open_images("ucf101")
    shutil.rmtree(images / "dots")
    (images / "dots").symlink_to(elsewhere)
    with pytest.raises(MalformedDataError, match="outside the folder of the images"):
        open_images("ucf101")
    (images / "dots").unlink()
    paint(folder / "kept", "1.jpg", "2.jpg", "3.jpg")
    (images / "dots").symlink_to(folder / "kept")
    assert len(open_images("ucf101")) == 4
    images.rename(elsewhere / "frames")  # but the folder of the images may be anywhere, as CoOp's page proposes
    images.symlink_to(elsewhere / "frames")
    (elsewhere / "frames/dots").unlink()
    paint(elsewhere / "frames", "dots/1.jpg", "dots/2.jpg", "dots/3.jpg")
    assert len(open_images("ucf101")) == 4


def test_images_that_are_missing_are_named(folder: Path) -> None:
    coop_copy(folder, "dtd")
    images = folder / "dtd/images"
    (images / "dots/3.jpg").unlink()
    shutil.rmtree(images / "grid")
    for split in ("train", "test"):
        with pytest.raises(DataUnavailableError, match="4 of 6 images are missing") as caught:
            open_images("dtd", split=split)
        text = str(caught.value)
        assert f"below {images}" in text
        assert "no dots/3.jpg, grid/1.jpg, grid/2.jpg and 1 more" in text
        assert "selfmask datasets" in text


def test_half_of_it_says_which_half(folder: Path) -> None:
    with pytest.raises(DataUnavailableError, match=r"found: +neither") as caught:
        open_images("ucf101")
    assert f"{split_file('ucf101', folder)}" in str(caught.value)
    assert coop.PAGE in str(caught.value)
    coop_copy(folder, "ucf101").unlink()
    with pytest.raises(DataUnavailableError, match=r"found: +not the split"):
        open_images("ucf101")
    coop_copy(folder, "ucf101")
    shutil.rmtree(folder / "ucf101/UCF-101-midframes")
    with pytest.raises(DataUnavailableError, match=r"found: +not the images"):
        open_images("ucf101")
    (folder / "ucf101/split_zhou_UCF101.json").unlink()
    os.mkfifo(folder / "ucf101/split_zhou_UCF101.json")  # is not waited for
    with pytest.raises(DataUnavailableError, match=r"found: +neither"):
        open_images("ucf101")


def test_damaged_splits_give_a_typed_error_or_a_right_set(folder: Path) -> None:
    file, outcomes = coop_copy(folder, "ucf101"), Counter[str]()
    inside = str(folder / "ucf101/UCF-101-midframes") + os.sep
    for number in range(400):
        rng = random.Random(f"coop/{number}")
        if rng.random() < 0.7:
            text = json.dumps(edit_json(copy.deepcopy(ROWS), rng)).encode("utf-8", "surrogatepass")
        else:
            text = mangle(json.dumps(ROWS).encode(), rng)
        file.write_bytes(text)
        try:
            train, test = open_images("ucf101"), open_images("ucf101", split="test")
        except DataError as error:
            outcomes[type(error).__name__] += 1
            continue
        outcomes["opened"] += 1
        for images in (train, test):
            assert isinstance(images, FileImages)
            assert images.labels is not None
            assert images.classes is not None
            assert all(0 <= label < len(images.classes) for label in images.labels)
            assert all(os.path.realpath(path).startswith(inside) for path in images.files)
        assert not {*train.names} & {*test.names}
    assert set(outcomes) == {"opened", "MalformedDataError", "DataUnavailableError"}
    assert min(outcomes.values()) > 5


# ---- iNatLoc500 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", ["iNatLoc", "."])
def test_inatloc(folder: Path, images: str) -> None:
    inatloc_copy(folder, images)
    train, test, divided = open_split("iNatLoc500")
    assert divided
    assert train.classes == test.classes == ["Anas a", "Anas b"]
    assert (train.labels, test.labels) == ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1])
    assert test.names[0] == "test/Aves/a b/0.jpg"
    assert [int(image[0, 0, 0]) for image in (*train, *test)] == list(range(10))
    assert (train.divided_by, train.note) == ("authors", "the split is that of its authors")


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("train/class_labels.txt", "../../secret.jpg,0\n", "below the folder"),
        ("train/class_labels.txt", "/etc/passwd,0\n", "below the folder"),
        ("test/class_labels.txt", "test/Aves/a b/0.jpg,2\n", "a label below 2"),
        ("test/class_labels.txt", "test/Aves/a b/0.jpg\n", "a label below 2"),
        ("test/class_labels.txt", "test/Aves/a b/0.jpg,0\n" * 2, "appears twice"),
        ("test/class_labels.txt", "", "no images"),
        ("class_names.txt", "Anas a,0\nAnas a,1\n", "a different name"),
        ("class_names.txt", "Anas a,0\nAnas b,2\n", "a different name"),
        ("class_names.txt", "", "a different name"),
    ],
)
def test_hostile_lists_are_refused(folder: Path, file: str, text: str, reason: str) -> None:
    (inatloc_copy(folder) / file).write_text(text)
    with pytest.raises(MalformedDataError, match=reason):
        open_images("inatloc500")


def test_inatloc_in_part(folder: Path) -> None:
    with pytest.raises(DataUnavailableError, match=r"found: +neither"):
        open_images("inatloc500")
    lists = inatloc_copy(folder)
    (folder / "inatloc500/iNatLoc/train/000_Animalia_a/1.jpg").unlink()
    with pytest.raises(DataUnavailableError, match=r"1 of 10 images are missing(.|\n)*000_Animalia_a/1\.jpg"):
        open_images("inatloc500", split="test")
    shutil.rmtree(folder / "inatloc500/iNatLoc")
    with pytest.raises(DataUnavailableError, match=r"found: +not the images"):
        open_images("inatloc500")
    paint(folder / "inatloc500/iNatLoc", "train/x/1.jpg")
    (lists / "test/class_labels.txt").unlink()
    with pytest.raises(DataUnavailableError, match=r"found: +no test/class_labels\.txt"):
        open_images("inatloc500")
