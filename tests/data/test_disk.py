"""Images that do not fit in memory, decoded once for all runs."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from selfmask.data import ImageStore, open_images
from selfmask.data import disk as disk_module
from selfmask.data.identity import Unchanged
from selfmask.data.sources import Images
from selfmask.errors import TooManyBadImagesError

from ..embedding.samples import pictures

MEMORY = 1000  # bytes: not one of them fits


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFMASK_CACHE", str(tmp_path / "cache"))


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "images").glob("*"))


def store(images: Images, *, memory: int | None = MEMORY, max_bad: float = 0.2) -> ImageStore:
    same = Unchanged(images)
    return ImageStore(images, side=24, memory=memory, max_bad=max_bad, content=same.content, holds=same.holds)


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("decoded again")


def test_it_is_the_store_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = open_images(pictures(tmp_path / "photos", 40, classes=2, bad=(0, 7, 39)))
    first, memory = store(images), store(images, memory=None)
    assert len(kept(tmp_path)) == 1
    monkeypatch.setattr(ImageStore, "_write", forbidden)
    second = store(images)
    for each in (first, second, pickle.loads(pickle.dumps(second))):
        assert each.cached
        assert each.tensor is None
        assert each.bad == memory.bad
        assert [each.place(i) for i in range(40)] == [memory.place(i) for i in range(40)]
        assert all(torch.equal(a, b) for a, b in zip(each.batch(range(40)), memory.batch(range(40)), strict=True))
    with pytest.raises(TooManyBadImagesError):
        store(images, max_bad=0.05)


def test_images_that_change_meanwhile_are_not_kept(tmp_path: Path) -> None:
    images = open_images(pictures(tmp_path / "photos", 10))
    same = Unchanged(images)

    def changed(done: int, total: int) -> None:
        (tmp_path / "photos" / "0003.png").write_bytes((tmp_path / "photos" / "0004.png").read_bytes())

    found = ImageStore(images, side=24, memory=MEMORY, content=same.content, holds=same.holds, progress=changed)
    assert not found.cached
    assert kept(tmp_path) == []


def test_other_images_are_another_file_and_the_oldest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        images = open_images(pictures(tmp_path / name, 10 + len(kept(tmp_path))))
        store(images)
    assert len(kept(tmp_path)) == 3
    monkeypatch.setattr(disk_module, "_LIMIT", 2 * max(path.stat().st_size for path in kept(tmp_path)) + 2000)
    store(open_images(pictures(tmp_path / "d", 9)))
    assert len(kept(tmp_path)) == 2


def too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_LIMIT", 100)


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_module.Writer, "add", write)


@pytest.mark.parametrize("trouble", [too_small, full])
def test_without_room_images_are_decoded_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[pytest.MonkeyPatch], None]
) -> None:
    images = open_images(pictures(tmp_path / "photos", 10))
    expected = store(images, memory=None)
    trouble(monkeypatch)
    found = store(images)
    assert not found.cached
    assert torch.equal(found[3], expected[3])
    assert kept(tmp_path) == []


def test_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    images = open_images(pictures(tmp_path / "photos", 10))
    expected = store(images)[3]
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    for damaged in (whole[:-50], whole[100:], b""):
        path.write_bytes(damaged)
        assert torch.equal(store(images)[3], expected)
        assert path.read_bytes() == whole
