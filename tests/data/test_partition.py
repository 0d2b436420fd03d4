"""What is learned from and what is tested with are apart, and a run remembers what it has seen."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision.datasets
from PIL import Image
from torch.utils.data import Dataset

from selfmask.data import SomeImages, open_images
from selfmask.data.identity import identity
from selfmask.data.images import MAX_PIXELS
from selfmask.data.partition import open_split, open_to_learn
from selfmask.data.seen import count_seen, write_seen
from selfmask.data.sources import DatasetImages
from selfmask.errors import ConfigError


def pictures(folder: Path, classes: int, each: int, shift: int = 0) -> Path:
    for label in range(classes):
        place = folder / f"class{label}"
        place.mkdir(parents=True)
        for number in range(each):
            colour = (shift + number, 10 * label, number)
            Image.new("RGB", (8, 8), colour).save(place / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("whole"), 3, 10)


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parted")
    pictures(folder / "train", 2, 6)
    pictures(folder / "test", 2, 4, shift=100)
    return folder


def test_labelled_images_without_splits_leave_those_that_evaluate_tests_with(whole: Path) -> None:
    images, note = open_to_learn(whole)
    train, test, _ = open_split(str(whole))
    assert images.names == train.names
    assert not {*images.names} & {*test.names}
    assert note.startswith("6 of 30 labelled images")
    assert "--split all" in note
    everything, note = open_to_learn(whole, split="all")
    assert (len(everything), note) == (30, "")
    with pytest.raises(ConfigError, match="split"):
        open_to_learn(whole, split="test")  # type: ignore[arg-type]


def test_a_list_with_labels_is_labelled(whole: Path, tmp_path: Path) -> None:
    listed = tmp_path / "list.csv"
    listed.write_text("".join(f"{file},{file.parent.name}\n" for file in sorted(whole.rglob("*.png"))))
    assert open_to_learn(listed).images.names == open_split(str(listed)).train.names
    listed.write_text("".join(f"{file}\n" for file in sorted(whole.rglob("*.png"))))
    assert len(open_to_learn(listed).images) == 30


def test_images_that_nothing_could_be_tested_with_are_used_whole(tmp_path: Path, whole: Path) -> None:
    for folder in (pictures(tmp_path / "one", 1, 5), pictures(tmp_path / "few", 3, 2), whole / "class0"):
        images, note = open_to_learn(folder)
        assert len(images) == len(open_images(folder))
        assert note == ""


def test_a_split_of_the_source_counts(parted: Path) -> None:
    images, note = open_to_learn(parted)
    assert len(images) == 12
    assert "test split is left" in note
    both, note = open_to_learn(parted, split="all")
    assert (len(both), note, both.classes) == (20, "", ["class0", "class1"])
    assert both.labels == [0] * 6 + [1] * 6 + [0] * 4 + [1] * 4
    assert both.names[0] == "train/class0/0.png"
    assert both.names[-1] == "test/class1/3.png"
    assert both[12].equal(open_images(parted, split="test")[0])
    assert identity(both) != identity(images)
    assert pickle.loads(pickle.dumps(both))[19].equal(both[19])


def test_array_files(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    pixels = np.arange(10 * 64, dtype=np.uint8).reshape(10, 8, 8)
    np.savez(file, train_images=pixels, train_labels=np.arange(10) % 2)
    assert len(open_to_learn(file).images) == len(open_to_learn(file, split="all").images) == 10
    np.savez(file, train_images=pixels, test_images=pixels + 1, train_labels=np.arange(10) % 2)
    assert len(open_to_learn(file).images) == 10
    assert len(open_to_learn(file, split="all").images) == 20
    assert len(open_to_learn("selfmask/fashion").images) == 4000  # as in all that the docs report


class Satellites(Dataset[Any]):
    """As torchvision has some: not divided."""

    classes = ("sea", "land")

    def __init__(self, root: Path, download: bool = False) -> None:
        self.targets = [number % 2 for number in range(20)]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> tuple[Image.Image, int]:
        return Image.new("RGB", (8, 8), (number, 0, 0)), number % 2


@pytest.mark.parametrize(("name", "kind"), [("eurosat", "EuroSAT"), ("sun397", "SUN397")])
def test_named_data_without_splits(monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    monkeypatch.setattr(torchvision.datasets, kind, Satellites)
    images, note = open_to_learn(name)
    train, test, divided = open_split(name)
    assert not divided
    assert (images.names, len(test)) == (train.names, 4)
    assert note.startswith("4 of 20 labelled images")
    # Of an object, its owner has decided what it holds.
    assert len(open_to_learn(Satellites(Path())).images) == len(open_to_learn(DatasetImages(Satellites(Path())))[0])
    assert len(open_to_learn(open_images(name)).images) == 20


def test_what_was_seen_is_known_by_content(whole: Path, parted: Path, tmp_path: Path) -> None:
    images = open_images(whole)
    seen = tmp_path / "seen.bin"
    assert count_seen(seen, images) is None
    write_seen(seen, SomeImages(images, [3, 1, 1, 7]))
    assert seen.stat().st_size == 3 * 8
    assert count_seen(seen, images) == 3
    copy = tmp_path / "copy" / "elsewhere"
    copy.mkdir(parents=True)
    (copy / "other name.png").write_bytes(Path(images.files[7]).read_bytes())  # type: ignore[attr-defined]
    assert count_seen(seen, open_images(copy)) == 1
    write_seen(tmp_path / "more", open_images(parted, split="test"), before=seen)
    assert count_seen(tmp_path / "more", images) == 3
    assert count_seen(tmp_path / "more", open_images(parted, split="test")) == 8


def test_what_is_no_record_says_nothing(whole: Path, tmp_path: Path) -> None:
    images = SomeImages(open_images(whole), [0])
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        assert count_seen(path, images) is None
    for content in (b"", b"1234567", b"\0" * 9):
        (tmp_path / "odd").write_bytes(content)
        assert count_seen(tmp_path / "odd", images) == 0


def test_a_pipe_among_the_images_is_not_waited_for(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "images", 1, 2)
    before = identity(open_images(folder))
    os.mkfifo(folder / "class0" / "pipe.png")
    assert identity(open_images(folder)) != before


def test_another_limit_of_pixels_is_another_identity(whole: Path) -> None:
    usual, other = open_images(whole), open_images(whole, max_pixels=60)
    assert identity(usual) == identity(open_images(whole, max_pixels=MAX_PIXELS))
    assert identity(usual) != identity(other)
    assert identity(SomeImages(usual, [1])) != identity(SomeImages(other, [1]))
    with pytest.raises(ConfigError, match="max_pixels"):
        open_images(whole, max_pixels=0)
