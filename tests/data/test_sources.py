"""Folders, lists, arrays, names and data sets: what is found, in which order, with which labels."""

import gzip
import os
import pickle
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from selfmask.data import Images, open_images
from selfmask.data.named import BUNDLED, TORCHVISION, data_folder, known_names
from selfmask.errors import (
    BadImageError,
    ConfigError,
    DataUnavailableError,
    MalformedDataError,
    NoImagesError,
    UnknownDataError,
)

from .copies import paint


def value(images: Images, i: int) -> int:
    return int(images[i][0, 0, 0])


# ---- folders ------------------------------------------------------------------------------------------------


def test_flat_folder_sorted(tmp_path: Path) -> None:
    images = open_images(paint(tmp_path, "b.png", "a.PNG", "10.jpg", "9.tiff"))
    assert images.names == ["10.jpg", "9.tiff", "a.PNG", "b.png"]
    assert [value(images, i) for i in range(4)] == [2, 3, 1, 0]
    assert images.labels is None
    assert images.classes is None
    assert images[0].shape == (3, 4, 5)
    assert open_images(str(tmp_path)).names == images.names
    assert len(list(images)) == 4


def test_class_folders(tmp_path: Path) -> None:
    images = open_images(paint(tmp_path, "dog/1.png", "cat/2.png", "cat/young/3.png", "a cat/1.png"))
    assert images.classes == ["a cat", "cat", "dog"]
    assert images.names == ["a cat/1.png", "cat/2.png", "cat/young/3.png", "dog/1.png"]
    assert images.labels == [0, 1, 1, 2]


def test_folders_that_are_no_classes(tmp_path: Path) -> None:
    one = open_images(paint(tmp_path / "one", "only/1.png", "only/2.png"))
    assert one.labels is None
    loose = open_images(paint(tmp_path / "loose", "cat/1.png", "dog/2.png", "loose.png"))
    assert loose.labels is None
    assert loose.names == ["cat/1.png", "dog/2.png", "loose.png"]


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_split_folders(tmp_path: Path, held_out: str) -> None:
    names = ["train/cat/1.png", "train/emu/2.png", "train/dog/3.png", f"{held_out}/dog/4.png", f"{held_out}/cat/5.png"]
    paint(tmp_path, *names)
    train = open_images(tmp_path)
    assert train.names == ["cat/1.png", "dog/3.png", "emu/2.png"]
    assert train.labels == [0, 1, 2]
    for split in ("test", "val"):
        test = open_images(tmp_path, split=split)
        assert test.names == ["cat/5.png", "dog/4.png"]
        assert test.labels == [0, 1]  # not shifted, although the emu is missing here
        assert test.classes == train.classes == ["cat", "dog", "emu"]


def test_plain_folder_is_every_split(tmp_path: Path) -> None:
    paint(tmp_path, "train/1.png", "other/2.png")  # a folder called train alone divides nothing
    assert open_images(tmp_path, split="test").names == open_images(tmp_path).names == ["other/2.png", "train/1.png"]
    with pytest.raises(ConfigError, match="split"):
        open_images(tmp_path, split="dev")


def test_hidden_and_foreign_files_are_skipped(tmp_path: Path) -> None:
    paint(tmp_path, "a.png", ".b.png", ".hidden/c.png", "__MACOSX/._a.png", "x/__MACOSX/d.png")
    (tmp_path / "notes.txt").write_text("no image")
    assert open_images(tmp_path).names == ["a.png"]
    assert open_images(tmp_path / ".hidden").names == ["c.png"]  # named on purpose


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    root = paint(tmp_path / "root", "real/1.png", "z/2.png")
    paint(tmp_path / "elsewhere", "3.png")
    (root / "real" / "up").symlink_to(root, target_is_directory=True)
    (root / "real" / "above").symlink_to(tmp_path, target_is_directory=True)
    (root / "a link to z").symlink_to(root / "z", target_is_directory=True)
    (root / "self").symlink_to("self")
    (root / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (root / "linked.png").symlink_to(root / "z" / "2.png")
    assert open_images(root).names == ["linked/3.png", "linked.png", "real/1.png", "z/2.png"]


def test_what_looks_like_an_image_is_listed_even_if_it_is_none(tmp_path: Path) -> None:
    paint(tmp_path, "good.png", "folder.jpg/inside.png")
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "broken.png").symlink_to("gone.png")
    images = open_images(tmp_path)
    assert images.names == ["broken.png", "folder.jpg/inside.png", "good.png", "text.jpg"]
    for i in (0, 3):
        with pytest.raises(BadImageError):
            images[i]


def test_odd_file_names(tmp_path: Path) -> None:
    odd = ["\N{CAT FACE} \N{COMBINING ACUTE ACCENT}e.png", "new\nline.png", os.fsdecode(b"caf\xe9.png"), " .png"]
    images = open_images(paint(tmp_path, *odd))
    assert sorted(images.names) == sorted([*odd[:2], "caf\\xe9.png", odd[3]])
    for name in images.names:
        name.encode()  # valid UTF-8
    assert sorted(value(images, i) for i in range(4)) == [0, 1, 2, 3]
    again = pickle.loads(pickle.dumps(images))
    assert torch.equal(again[2], images[2])


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NoImagesError, match="no files at all"):
        open_images(tmp_path)
    (tmp_path / "a.psd").touch()
    (tmp_path / "b.PSD").touch()
    with pytest.raises(NoImagesError, match=r"2 x \.psd") as caught:
        open_images(tmp_path)
    assert ".jpg" in str(caught.value)
    for missing in (tmp_path / "gone", str(tmp_path / "gone"), "./gone", "a\0/b", "~nobody-here/x", "x/" * 3000):
        with pytest.raises(NoImagesError, match="does not exist"):
            open_images(missing)
    paint(tmp_path, "one.png")
    with pytest.raises(NoImagesError, match="folder that contains it"):
        open_images(tmp_path / "one.png")
    with pytest.raises(NoImagesError, match=r"list file"):
        open_images(tmp_path / "a.psd")
    with pytest.raises(ConfigError):
        open_images(3)  # type: ignore[arg-type]


@pytest.fixture
def forbidden() -> Iterator[Path]:
    """A folder that this process may not look into; a super-user has to become somebody else for that."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        paint(Path(folder), "a.png", "closed/b.png")
        (Path(folder) / "closed").chmod(0)
        was = os.geteuid()
        if was == 0:
            os.seteuid(65534)
        yield Path(folder)
        os.seteuid(was)
        (Path(folder) / "closed").chmod(0o700)


def test_closed_folder_is_not_passed_over_in_silence(forbidden: Path) -> None:
    with pytest.raises(NoImagesError, match=r"closed(.|\n)*Permission denied"):
        open_images(forbidden)


# ---- lists --------------------------------------------------------------------------------------------------


def test_list_of_paths(tmp_path: Path) -> None:
    paint(tmp_path, "x/1.png", "x/2.png", "3.png")
    (tmp_path / "some.txt").write_text(f"x/2.png\n\n3.png\r\n{tmp_path}/x/1.png")
    images = open_images(tmp_path / "some.txt")
    assert images.names == ["x/2.png", "3.png", f"{tmp_path}/x/1.png"]
    assert [value(images, i) for i in range(3)] == [1, 2, 0]
    assert images.labels is None


@pytest.mark.parametrize("parted", ["\t", ",", ", "])
def test_list_with_labels(tmp_path: Path, parted: str) -> None:
    (tmp_path / "l.csv").write_text(
        f"\ufeffpath{parted}label\n2.png{parted}dog\n1.png{parted}big cat\n3.png{parted}dog\n"
    )
    images = open_images(tmp_path / "l.csv")
    assert images.names == ["2.png", "1.png", "3.png"]
    assert images.classes == ["big cat", "dog"]
    assert images.labels == [1, 0, 1]


def test_list_with_numbers_as_labels(tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("a.png\t7\nb.png\t0\n")
    images = open_images(tmp_path / "l.txt")
    assert images.labels == [7, 0]  # as they are, so that two lists agree
    assert images.classes is None


def test_list_with_odd_names(tmp_path: Path) -> None:
    paint(tmp_path, "a,b.png", os.fsdecode(b"caf\xe9.png"))
    (tmp_path / "l.csv").write_bytes(b'"a,b.png",x\ncaf\xe9.png,y\n')
    images = open_images(tmp_path / "l.csv")
    assert images.names == ["a,b.png", "caf\\xe9.png"]
    assert [value(images, i) for i in range(2)] == [0, 1]


def test_a_carriage_return_within_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a.png,1\nb\rc.png,2\n")
    with pytest.raises(MalformedDataError, match="line 2 cannot be read"):
        open_images(tmp_path / "a.csv")


SPLIT = "a.png,cat,train\nb.png,dog,test\nc.png,emu,train\nd.png,cat,val\n"


@pytest.mark.parametrize(
    "text",
    [
        SPLIT,
        "path,label,split\n" + SPLIT,
        SPLIT.replace(",", "\t").replace("train", "Train"),
        "file,split,label\na.png,train,cat\nb.png,test,dog\nc.png,train,emu\nd.png,val,cat\n",
    ],
)
def test_list_that_names_a_split(tmp_path: Path, text: str) -> None:
    (tmp_path / "l.csv").write_text(text)
    train, test, val = (open_images(tmp_path / "l.csv", split=split) for split in ("train", "test", "val"))
    assert (train.names, train.labels) == (["a.png", "c.png"], [0, 2])
    assert (test.names, test.labels) == (["b.png"], [1])
    assert (val.names, val.labels) == (["d.png"], [0])
    assert train.classes == test.classes == val.classes == ["cat", "dog", "emu"]
    assert not train.undivided


@pytest.mark.parametrize("text", ["path,split\na.png,train\nb.png,val\n", "a.png,,train\nb.png,,val\n"])
def test_list_that_names_a_split_and_no_labels(tmp_path: Path, text: str) -> None:
    (tmp_path / "l.csv").write_text(text)
    for split, name in (("train", "a.png"), ("test", "b.png"), ("val", "b.png")):
        images = open_images(tmp_path / "l.csv", split=split)
        assert (images.names, images.labels) == ([name], None)


def test_classes_called_as_splits_are_classes(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("a.png,train\nb.png,test\n")  # a railway, and an exam
    images = open_images(tmp_path / "l.csv", split="test")
    assert (images.labels, images.classes, images.undivided) == ([1, 0], ["test", "train"], True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("path,label,split\na.png,1,train\nb.png,1,rest\n", "image 2 is of no split"),
        ("path,split\na.png,train\nb.png\n", "image 2 is of no split"),
        ("path,split\na.png,train\nb,c.png,test\n", "image 2 is of no split"),
        ("a.png,1,train\nb.png,1,train\n", "all are of train"),
        ("a.png,1,val\nb.png,1,test\n", "all are of test and val"),
        ("a.png,1,train\nb.png,1,tset\n", r"third column may name the split \(train, test, val\)"),
        ("a.png,,train\nb.png,1,test\nc.png,1,2,3\n", "more than one label"),
    ],
)
def test_lists_that_name_splits_wrongly(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "l.csv").write_text(text)
    with pytest.raises(MalformedDataError, match=reason):
        open_images(tmp_path / "l.csv")


def test_malformed_lists(tmp_path: Path) -> None:
    file = tmp_path / "l.txt"
    file.write_text("a.png,1\nb.png\n")
    with pytest.raises(MalformedDataError, match="image 2 has no label"):
        open_images(file)
    file.write_text("a.png,1\nb,c.png,1\n")
    with pytest.raises(MalformedDataError, match="quote paths"):
        open_images(file)
    file.write_text("\n \n")
    with pytest.raises(NoImagesError):
        open_images(file)
    file.write_text("gone.png\n")
    with pytest.raises(BadImageError, match="no such file"):
        open_images(file)[0]


# ---- arrays -------------------------------------------------------------------------------------------------


def arrays(**changes: Any) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "train_images": random.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8),
        "train_labels": np.array([0, 1, 2, 0, 1, 2]),
        "test_images": random.integers(0, 256, (3, 5, 4), dtype=np.uint8),
        "classes": np.array(["a", "b", "c"]),
        **changes,
    }


def test_array_file(tmp_path: Path) -> None:
    file, content = tmp_path / "x.npz", arrays()
    np.savez(file, **content)
    train, test = open_images(file), open_images(file, split="val")
    assert train.names[:2] == ["000000", "000001"]
    assert (train.labels, train.classes) == ([0, 1, 2, 0, 1, 2], ["a", "b", "c"])
    assert np.array_equal(train[3].permute(1, 2, 0), content["train_images"][3])
    assert test.labels is None
    for channel in test[1]:
        assert np.array_equal(channel, content["test_images"][1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train_images": np.zeros((6, 5, 4, 3), np.float32)}, "float32"),
        ({"train_images": np.zeros((6, 3, 5, 4), np.uint8)}, "N x H x W x 3"),
        ({"train_images": np.zeros((6, 0, 4), np.uint8)}, "pixels"),
        ({"train_labels": np.zeros(5, int)}, "6 images"),
        ({"train_labels": np.zeros(6)}, "integer"),
        ({"train_labels": np.array([0, 1, 3, 0, 1, 2])}, "0 to 2"),
        ({"train_labels": np.array([0, -1, 3, 0, 1, 2])}, "-1"),
        ({"train_images": np.array([{}], dtype=object)}, "pickled objects"),
    ],
)
def test_malformed_arrays(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays(**changes))
    with pytest.raises(MalformedDataError, match=reason):
        open_images(tmp_path / "x.npz")


def test_array_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    np.savez(file, images=np.zeros((2, 3, 3), np.uint8))
    with pytest.raises(MalformedDataError, match="train_images"):
        open_images(file)
    np.savez(file, train_images=np.zeros((0, 3, 3), np.uint8))
    with pytest.raises(NoImagesError):
        open_images(file)
    whole = Path(BUNDLED["selfmask/fashion"]).read_bytes()
    for content in (b"", b"text", whole[:1_000_000], whole[:500_000] + bytes(1000) + whole[501_000:]):
        file.write_bytes(content)
        with pytest.raises(MalformedDataError):
            open_images(file)


# ---- names --------------------------------------------------------------------------------------------------


def test_bundled_fashion() -> None:
    for split, each in (("train", 400), ("test", 100)):
        images = open_images("selfmask/fashion", split=split)
        assert images.labels is not None
        assert np.array_equal(np.bincount(images.labels), np.full(10, each))
        assert images.classes is not None
        assert images.classes[9] == "Ankle boot"
        assert images[0].shape == (3, 28, 28)
    assert BUNDLED["selfmask/fashion"].stat().st_size < 3_000_000
    assert "Zalando" in BUNDLED["selfmask/fashion"].with_name("FASHION-MNIST-LICENSE").read_text()


def test_array_file_by_name(folder: Path) -> None:
    np.savez(folder / "cifar10.npz", **arrays())
    np.savez(folder / "my-own.npz", **arrays())
    assert len(open_images("cifar10")) == 6  # goes before torchvision's
    assert len(open_images("my-own", split="test")) == 3
    assert "my-own" in known_names()


def test_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SELFMASK_DATA", "~/somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / "somewhere"
    monkeypatch.delenv("SELFMASK_DATA")
    assert data_folder() == tmp_path / ".cache/selfmask/data"


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def test_torchvision_from_files(folder: Path) -> None:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", 7), ("t10k", 4)):
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(idx(np.full((count, 28, 28), count, np.uint8)))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.arange(count, dtype=np.uint8)))
    train, test = open_images("mnist"), open_images("MNIST", split="test")
    assert (len(train), len(test)) == (7, 4)
    assert train.labels == list(range(7))
    assert train.classes is not None
    assert train.classes[1] == "1 - one"
    assert (test[0] == 4).all()
    assert test[0].shape == (3, 28, 28)


def test_torchvision_train_and_val_are_joined(folder: Path) -> None:
    paint(folder / "dtd/dtd/images", *(f"{kind}/{i}.jpg" for kind in ("dots", "grid") for i in range(3)))
    labels = folder / "dtd/dtd/labels"
    labels.mkdir()
    for i, part in enumerate(("train", "val", "test")):
        (labels / f"{part}1.txt").write_text(f"grid/{i}.jpg\ndots/{i}.jpg\n")
    train, test = open_images("dtd"), open_images("dtd", split="test")
    assert (train.labels, train.classes) == ([1, 0, 1, 0], ["dots", "grid"])
    assert [value(train, i) for i in range(4)] == [3, 0, 4, 1]
    assert [value(test, i) for i in range(2)] == [5, 2]


def test_every_torchvision_name_says_what_to_do_without_network(folder: Path) -> None:
    for name in TORCHVISION:
        for split in ("train", "test"):
            with pytest.raises(DataUnavailableError, match=f"{name}.npz"):
                open_images(name, split=split)


def test_unknown_names(folder: Path) -> None:
    for typo, meant in (("cifar-10", "cifar10"), ("selfmask/fashon", "selfmask/fashion"), ("flower102", "flowers102")):
        with pytest.raises(UnknownDataError, match=f"did you mean(.|\n)*{meant}"):
            open_images(typo)
    with pytest.raises(UnknownDataError, match="check the path"):
        open_images("qqqqqqqq")


# ---- data sets of PyTorch -----------------------------------------------------------------------------------


class Things(Dataset[Any]):
    def __init__(self, *items: Any, **attributes: Any) -> None:
        self.items = items
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


PIXELS = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
CHW = torch.from_numpy(PIXELS).permute(2, 0, 1)


def test_items_of_every_kind() -> None:
    images = open_images(
        Things(
            Image.fromarray(PIXELS), PIXELS, PIXELS / 255, CHW, CHW / 255, (CHW, 3), [PIXELS, 1], (CHW / 255).double()
        )
    )
    for image in images:
        assert image.dtype == torch.uint8
        assert torch.equal(image, CHW)
    grey = open_images(Things(CHW[:1], CHW[0], PIXELS[:, :, 0], Image.fromarray(PIXELS[:, :, 0])))
    for image in grey:
        assert torch.equal(image, CHW[:1].expand(3, -1, -1))
    assert open_images(images) is images


def test_items_that_are_no_images() -> None:
    images = open_images(Things("text", (CHW - 100.0) / 50, CHW.long(), {"image": CHW}, torch.zeros(2, 3, 4, 5), None))
    for i in range(len(images)):
        with pytest.raises(BadImageError):
            images[i]
    with pytest.raises(IndexError):
        images[6]


def test_labels_that_are_cheaply_known() -> None:
    one = Things(CHW, CHW, CHW, targets=[2, 0, 1], classes=["a", "b", "c"])
    two = Things(CHW, CHW, labels=torch.tensor([1, 1]), classes=("a", "b", "c"))
    assert open_images(one).labels == [2, 0, 1]
    assert open_images(Subset(one, [2, 0])).labels == [1, 2]
    both = open_images(ConcatDataset([one, two]))
    assert (both.labels, both.classes) == ([2, 0, 1, 1, 1], ["a", "b", "c"])
    assert open_images(ConcatDataset([one, Things(CHW)])).labels is None
    assert open_images(ConcatDataset([one, Things(CHW, targets=[0], classes=["c"])])).labels is None
    for other in ([0.5, 1.0, 2.0], [0, 1], [[1, 2], [3], [4]], ["a", "b", "c"], [[1], [2], [3]]):
        assert open_images(Things(CHW, CHW, CHW, targets=other)).labels is None


def test_data_sets_that_cannot_be_used() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield CHW

    with pytest.raises(MalformedDataError, match="no length"):
        open_images(Endless())
    with pytest.raises(NoImagesError):
        open_images(Things())


def test_idx_files_of_the_bundling_tool_are_read(tmp_path: Path) -> None:
    from runpy import run_path

    tool = run_path(str(Path(__file__).parents[2] / "tools" / "make_fashion.py"))
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    (tmp_path / "x.gz").write_bytes(gzip.compress(idx(values)))
    assert np.array_equal(tool["read_idx"](tmp_path / "x.gz"), values)
    labels = np.tile(np.arange(10, dtype=np.uint8), 5)
    chosen = tool["choose"](labels, 3, 0)
    assert np.array_equal(np.bincount(labels[chosen]), np.full(10, 3))
    assert len(set(chosen)) == 30
