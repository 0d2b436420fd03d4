"""Tars of images: the same as a folder of them, and refused when they are not whole."""

import gzip
import hashlib
import pickle
from pathlib import Path

import pytest

from selfmask.data import ImageStore, open_images
from selfmask.data import tars as tars_module
from selfmask.data.identity import Unchanged, identity, stamps
from selfmask.data.partition import open_split, open_to_learn
from selfmask.data.places import LocalFile, expanded
from selfmask.data.tars import members_of
from selfmask.errors import BadImageError, ConfigError, MalformedDataError, NoImagesError

from .shards import png, shards, write_tar


def test_a_tar_of_a_folder_is_that_folder(tmp_path: Path) -> None:
    members = {f"{kind}/{number:03d}.png": png(number) for kind in ("cats", "dogs") for number in range(5)}
    members["dogs/009.jpg"] = b"no image"
    for name, data in members.items():
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(data)
    write_tar(tmp_path / "photos.tar", members | {"cats/readme.txt": b"hello", ".hidden.png": b"", "._x.png": b""})
    folder, tar = open_images(tmp_path / "photos"), open_images(tmp_path / "photos.tar")
    assert (tar.names, tar.labels, tar.classes) == (list(members), folder.labels, ["cats", "dogs"])
    assert all(tar[i].equal(folder[i]) for i in range(10))
    assert identity(tar) == identity(folder)
    for images in (folder, tar):
        with pytest.raises(BadImageError, match="not an image"):
            images[10]
    assert ImageStore(tar, side=32, max_bad=0.1).bad == ImageStore(folder, side=32, max_bad=0.1).bad


def test_braces_a_folder_and_a_list_of_alternatives(tmp_path: Path) -> None:
    shards(tmp_path / "s", 3, labels=True)
    images = open_images(f"{tmp_path}/s/photos-{{000..002}}.tar")
    assert images.names == [f"{number:05d}.png" for number in range(30)]
    assert images.labels == [number % 2 for number in range(30)]
    assert images.classes is None
    assert identity(open_images(tmp_path / "s")) == identity(images)
    some = open_images(f"{tmp_path}/s/photos-{{000,002}}.tar")
    assert some.names == [*images.names[:10], *images.names[20:]]
    assert some[10].equal(images[20])


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{8..11}.tar", ["a-8.tar", "a-9.tar", "a-10.tar", "a-11.tar"]),
        ("{08..10}", ["08", "09", "10"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{x,y}-{0..1}", ["x-0", "x-1", "y-0", "y-1"]),
    ],
)
def test_patterns_are_those_of_a_shell(pattern: str, names: list[str]) -> None:
    assert expanded(pattern) == names


def test_a_pattern_of_a_billion_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="too many files"):
        expanded("{0..999999999}.tar")


def test_train_and_test_folders_of_tars_are_the_splits(tmp_path: Path) -> None:
    shards(tmp_path / "s" / "train", 2, labels=True)
    write_tar(
        tmp_path / "s" / "val" / "a.tar",
        {f"v{i}.png": png(50 + i) for i in range(4)} | {f"v{i}.cls": b"1" for i in range(4)},
    )
    split = open_split(str(tmp_path / "s"))
    assert (len(split.train), len(split.test), split.divided) == (20, 4, True)
    undivided = open_split(str(tmp_path / "s" / "train"))
    assert (len(undivided.train), len(undivided.test), undivided.divided) == (16, 4, False)
    assert "left for testing" in open_to_learn(str(tmp_path / "s" / "train")).note


def test_images_of_the_same_name_get_that_of_their_tar(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tar(tmp_path / f"{name}.tar", {"0.png": png(ord(name)), "1.png": png(1)})
    images = open_images(tmp_path)
    assert images.names == ["a.tar/0.png", "a.tar/1.png", "b.tar/0.png", "b.tar/1.png"]
    assert not images[0].equal(images[2])


def test_a_tar_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFMASK_CACHE", str(tmp_path / "cache"))
    path = shards(tmp_path / "s", 1, labels=True) / "photos-000.tar"
    looks = []
    look = tars_module._looked_through
    monkeypatch.setattr(tars_module, "_looked_through", lambda tar: looks.append(tar.name) or look(tar))
    first = open_images(path)
    again = open_images(path)
    assert len(looks) == 1
    assert (again.names, again.labels) == (first.names, first.labels)
    write_tar(path, {"x.png": png(1)})
    assert open_images(path).names == ["x.png"]
    assert len(looks) == 2
    kept = max((tmp_path / "cache" / "tars").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    kept.write_bytes(kept.read_bytes()[:100])  # damaged: looked through again
    assert open_images(path).names == ["x.png"]
    assert len(looks) == 3


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.75])
def test_a_tar_cut_short_is_named(tmp_path: Path, cut: float) -> None:
    shards(tmp_path, 2)
    path = tmp_path / "photos-001.tar"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    with pytest.raises(MalformedDataError, match=r"photos-001.tar is damaged or cut short"):
        open_images(tmp_path)


def test_a_tar_cut_between_two_files_or_damaged_within_is_named(tmp_path: Path) -> None:
    path = shards(tmp_path, 1) / "photos-000.tar"
    whole, members = path.read_bytes(), members_of(LocalFile(str(path)))
    start = int(members.offsets[5]) - 512  # the header of the sixth
    path.write_bytes(whole[:start])
    with pytest.raises(MalformedDataError, match="5 whole files"):
        open_images(path)
    path.write_bytes(whole[:start] + b"x" * 512 + whole[start + 512 :])
    with pytest.raises(MalformedDataError, match="5 whole files"):
        open_images(path)
    path.write_bytes(gzip.compress(whole))
    with pytest.raises(MalformedDataError, match="is compressed"):
        open_images(path)


def test_a_missing_shard_and_a_tar_without_images_are_named(tmp_path: Path) -> None:
    shards(tmp_path, 2)
    with pytest.raises(NoImagesError, match=r"photos-002.tar"):
        open_images(f"{tmp_path}/photos-{{000..003}}.tar")
    write_tar(tmp_path / "texts.tar", {"a.txt": b"hello"})
    with pytest.raises(NoImagesError, match=r"no images in .*texts.tar"):
        open_images(tmp_path / "texts.tar")


def test_a_tar_that_is_written_over_is_seen(tmp_path: Path) -> None:
    path = shards(tmp_path, 1) / "photos-000.tar"
    images = open_images(path)
    same = Unchanged(images)
    assert same.holds()
    data = path.read_bytes()
    path.write_bytes(data)  # another time, the same content
    assert same.holds()
    changed = bytearray(data)
    changed[int(members_of(LocalFile(str(path))).offsets[3]) + 60] ^= 1
    path.write_bytes(changed)
    assert not same.holds()


def test_a_tar_is_read_once_to_be_decoded_and_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = open_images(shards(tmp_path, 1) / "photos-000.tar")
    reads = []
    read = LocalFile.read
    monkeypatch.setattr(LocalFile, "read", lambda self, *part: reads.append(part) or read(self, *part))
    images[4]
    assert images.sha256(4) == hashlib.sha256(png(4)).digest()
    assert len(reads) == 1
    assert stamps(images) == stamps(pickle.loads(pickle.dumps(images)))
