"""Features are computed once for the same images and the same model, and again for any other."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.data import Images, SomeImages, open_images
from selfmask.data.identity import identity
from selfmask.data.sources import ArrayImages
from selfmask.embedding.cache import FeatureCache, Vectors, cache_folder
from selfmask.embedding.embedder import Embedder
from selfmask.embedding.extraction import extract
from selfmask.embedding.vectors import embed
from selfmask.errors import EvaluationError

from .samples import HOW, pictures, tiny


class Counted:
    """A model on one backbone that counts the images it sees."""

    def __init__(self, seed: int | None = None) -> None:
        model = tiny()
        self.seen = 0
        model.register_forward_hook(self.count)
        if seed is None:
            self.embedder = Embedder("tiny", model, HOW, 256)
        else:
            masked = get_masked_model(model, MaskConfig(rule="topk", active_share=0.5, seed=seed)).eval()
            self.embedder = Embedder("tiny + mask", masked, HOW, 256)

    def count(self, _: object, inputs: tuple[torch.Tensor], __: object) -> None:
        self.seen += len(inputs[0])


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, notes: list[str]) -> FeatureCache:
    return FeatureCache(tmp_path / "cache", notes.append)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return pictures(tmp_path / "photos", 12, bad=(5,))


def test_the_second_time_nothing_is_computed(cache: FeatureCache, photos: Path) -> None:
    model = Counted(1)
    first = extract(model.embedder, open_images(photos), cache=cache)
    assert model.seen == 22
    second = extract(model.embedder, open_images(photos), cache=cache)
    assert model.seen == 22
    assert isinstance(model.embedder.model, MaskedModel)
    plain, kept = embed(model.embedder.model, open_images(photos), HOW)
    assert torch.equal(second["mask"].rows, plain)
    assert second["mask"].kept == kept == [i for i in range(12) if i != 5]
    for side in ("frozen", "mask"):
        assert torch.equal(first[side].rows, second[side].rows)
    assert not torch.equal(first["frozen"].rows, first["mask"].rows)


def test_masks_of_one_backbone_share_its_features(cache: FeatureCache, photos: Path) -> None:
    frozen = extract((backbone := Counted()).embedder, open_images(photos), cache=cache)["frozen"]
    assert backbone.seen == 11
    for seed in (1, 2):
        model = Counted(seed)
        found = extract(model.embedder, open_images(photos), cache=cache)
        assert model.seen == 11  # with the mask only
        assert torch.equal(found["frozen"].rows, frozen.rows)
        without = extract(model.embedder, open_images(photos))
        assert torch.allclose(found["mask"].rows, without["mask"].rows)
        assert torch.allclose(found["frozen"].rows, without["frozen"].rows)


def test_whatever_the_vectors_depend_on_changes_the_key() -> None:
    plain = Counted().embedder
    base = plain.fingerprint("frozen")
    seen = {base, *(Counted(seed).embedder.fingerprint("mask") for seed in (1, 2))}
    assert Counted(1).embedder.fingerprint("frozen") == base
    preprocessing = HOW.__class__((32, 32), HOW.mean, HOW.std, "bilinear")
    seen.add(Embedder("tiny", plain.model, preprocessing, 256).fingerprint("frozen"))
    other = tiny()
    next(other.parameters()).data[0] += 1e-3
    seen.add(Embedder("tiny", other, HOW, 256).fingerprint("frozen"))
    other = tiny()
    other.add_module("more", torch.nn.ReLU())  # no weights, but another network
    seen.add(Embedder("tiny", other, HOW, 256).fingerprint("frozen"))
    assert len(seen) == 6


def test_any_changed_file_is_noticed(cache: FeatureCache, photos: Path) -> None:
    model = Counted()
    extract(model.embedder, open_images(photos), cache=cache)
    file = photos / "0007.png"
    before = file.stat()
    pixels = np.asarray(Image.open(file)).copy()
    pixels[0, 0] ^= 255
    Image.fromarray(pixels).save(file, compress_level=0)
    Image.fromarray(pixels ^ 1).save(photos / "other.png", compress_level=0)
    extract(model.embedder, open_images(photos), cache=cache)
    assert model.seen == 11 + 12
    # The content alone counts: not when it was written, and also where size and time are the same.
    (photos / "other.png").unlink()
    first, size = identity(open_images(photos)), file.stat().st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert identity(open_images(photos)) == first
    Image.fromarray(pixels ^ 1).save(file, compress_level=0)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == size
    assert identity(open_images(photos)) != first


def test_the_same_images_elsewhere_are_the_same_images(photos: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(photos, tmp_path / "elsewhere")
    assert identity(open_images(moved)) == identity(open_images(photos))
    (moved / "0003.png").rename(moved / "first.png")
    assert identity(open_images(moved)) != identity(open_images(photos))
    some = SomeImages(open_images(photos), [1, 2])
    assert identity(some) != identity(SomeImages(open_images(photos), [1, 3]))


class Photos(Dataset[torch.Tensor]):
    def __init__(self, pixels: torch.Tensor) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.pixels[i]


@pytest.mark.parametrize("kind", ["array", "data set"])
def test_any_changed_pixel_is_noticed(kind: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 3)).astype(np.uint8)

    def source() -> Images:
        if kind == "array":
            return ArrayImages(pixels.copy(), [0] * 40)
        return open_images(Photos(torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2)))

    first = identity(source())
    assert identity(source()) == first
    for image in (0, 13, 39):
        pixels[image, 3, 4, 1] ^= 1
        assert identity(source()) != first
        pixels[image, 3, 4, 1] ^= 1
    assert identity(source()) == first


def test_images_of_a_data_set_that_are_bad_count_too() -> None:
    one, two = (TensorDataset(torch.zeros(3, *shape)) for shape in ((3, 4, 4), (2, 2)))
    assert identity(open_images(one)) != identity(open_images(two))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-5],
    "a bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "empty": lambda _: b"",
    "another file": lambda _: b"no tensors here, only words",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entries_are_computed_again(cache: FeatureCache, photos: Path, damage: str) -> None:
    model = Counted()
    first = extract(model.embedder, open_images(photos), cache=cache)["frozen"]
    (entry,) = cache.folder.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(DAMAGE[damage](whole))
    again = extract(model.embedder, open_images(photos), cache=cache)["frozen"]
    assert model.seen == 22
    assert torch.equal(again.rows, first.rows)
    assert entry.read_bytes() == whole  # and written anew


def test_the_oldest_go_when_the_folder_is_full(tmp_path: Path, notes: list[str]) -> None:
    vectors = Vectors(torch.zeros(100, 100), list(range(100)))  # about 41 kB
    cache = FeatureCache(tmp_path / "cache", notes.append, limit=130_000)
    for number, key in enumerate(("a", "b", "c")):
        cache.put(key, vectors)
        os.utime(cache.folder / f"{key}.safetensors", (number, number))
    assert cache.get("a") is not None  # used just now: "b" is the oldest
    cache.put("d", vectors)
    assert sorted(path.stem for path in cache.folder.iterdir()) == ["a", "c", "d"]
    cache.put("large", Vectors(torch.zeros(1000, 100), list(range(1000))))
    assert cache.get("large") is None
    assert cache.get("d") is not None
    assert not notes


def test_a_folder_that_cannot_be_written_is_only_said(tmp_path: Path, photos: Path, notes: list[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = FeatureCache(tmp_path / "file" / "cache", notes.append)
    model = Counted(1)
    found = extract(model.embedder, open_images(photos), cache=cache)
    assert len(found["mask"].kept) == 11
    assert len(notes) == 1
    assert "not kept" in notes[0]


def test_a_folder_that_can_only_be_read_is_of_use(
    cache: FeatureCache, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Counted()
    extract(model.embedder, open_images(photos), cache=cache)

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refused)  # root, who may run the tests, can write anywhere
    extract(model.embedder, open_images(photos), cache=cache)
    assert model.seen == 11


def test_the_folder_is_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFMASK_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.delenv("SELFMASK_CACHE")
    assert cache_folder().is_relative_to(Path.home())


def test_no_image_that_can_be_read(tmp_path: Path) -> None:
    photos = pictures(tmp_path / "photos", 2, bad=(0, 1))
    with pytest.raises(EvaluationError, match="none of the 2"):
        extract(Counted().embedder, open_images(photos))
