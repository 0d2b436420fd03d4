"""The store: what is kept, what is reduced, what happens to bad images, within which memory."""

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from selfmask.data import Images, ImageStore, open_images
from selfmask.errors import ConfigError, NoImagesError, TooManyBadImagesError


def folder(
    root: Path, count: int, *, bad: tuple[int, ...] = (), sizes: tuple[tuple[int, int], ...] = ((8, 6),)
) -> Images:
    """`count` images in two class folders, each of its own grey value, some of them broken."""
    for i in range(count):
        file = root / ("even", "odd")[i % 2] / f"{i:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        if i in bad:
            file.write_text("no image at all")
        else:
            Image.new("L", sizes[i % len(sizes)], i % 256).save(file)
    return open_images(root)


def value(image: torch.Tensor) -> int:
    assert image.dtype == torch.uint8
    assert image.amin() == image.amax()
    return int(image[0, 0, 0])


def test_all_of_one_size_are_one_tensor(tmp_path: Path) -> None:
    images = folder(tmp_path, 30)
    calls: list[tuple[int, int]] = []
    store = ImageStore(images, side=32, progress=lambda *call: calls.append(call))
    assert store.cached
    assert store.tensor is not None
    assert store.tensor.shape == (30, 3, 6, 8)
    assert (store.names, store.labels, store.classes) == (images.names, images.labels, ["even", "odd"])
    assert store.bad == []
    for i in range(30):
        assert torch.equal(store[i], images[i])
    assert torch.equal(store[-1], images[29])
    assert [value(image) for image in store.batch([3, 0, 29, 3])] == [value(images[i]) for i in (3, 0, 29, 3)]
    assert calls[-1] == (30, 30)
    with pytest.raises(IndexError):
        store[30]


def test_images_of_many_sizes(tmp_path: Path) -> None:
    images = folder(tmp_path, 80, sizes=((8, 6), (5, 9), (7, 7), (1, 20)))
    store = ImageStore(images, side=32)
    assert store.cached
    assert store.tensor is None
    for got, i in zip(store.batch(range(80)), range(80), strict=True):
        assert torch.equal(got, images[i])


def test_a_rare_other_size_is_found_late(tmp_path: Path) -> None:
    """Of 200 images every fourth is looked at first; this one is not among them."""
    folder(tmp_path, 200)
    Image.new("L", (50, 40), 9).save(tmp_path / "odd" / "0003.png")
    images = open_images(tmp_path)
    store = ImageStore(images, side=64)
    assert store.tensor is None
    assert all(torch.equal(store[i], images[i]) for i in range(200))


def test_larger_images_are_reduced_to_the_side(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    Image.fromarray(pixels.transpose(1, 0, 2)).save(tmp_path / "high.png")
    Image.fromarray(pixels[:20, :80]).save(tmp_path / "small.png")
    store = ImageStore(images := open_images(tmp_path), side=20)
    assert [tuple(store[i].shape) for i in range(3)] == [(3, 30, 20), (3, 20, 80), (3, 20, 30)]
    assert torch.equal(store[1], images[1])
    # the oracle: Pillow's own antialiased bicubic
    expected = np.asarray(Image.fromarray(pixels).resize((30, 20), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(store[2].permute(1, 2, 0).numpy() - expected).max() <= 1


def test_large_photographs_are_reduced_alike_by_the_fast_way(tmp_path: Path) -> None:
    small = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    Image.fromarray(small).resize((1800, 1200), Image.Resampling.BICUBIC).save(tmp_path / "x.jpg", quality=95)
    images = open_images(tmp_path)
    expected = transforms.resize(images[0], [100], InterpolationMode.BICUBIC, antialias=True)
    (found,) = ImageStore(images, side=100)
    assert found.shape == (3, 100, 150)
    assert (found.int() - expected.int()).abs().max() <= 6


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("memory", [0, 10**9])
@pytest.mark.parametrize("sizes", [((8, 6),), ((8, 6), (5, 9), (7, 7))])
def test_the_next_good_image_takes_the_place_of_a_bad_one(
    tmp_path: Path, workers: int, memory: int, sizes: tuple[tuple[int, int], ...]
) -> None:
    images = folder(tmp_path, 100, bad=(0, 7, 9, 98, 99), sizes=sizes)
    store = ImageStore(images, side=32, workers=workers, memory=memory)
    assert store.cached == (memory > 0)
    assert len(store) == 100
    assert (store.names, store.labels) == (images.names, images.labels)
    numbers = [int(name[-8:-4]) for name in images.names]  # 0, 2, ... 98, 1, 3, ... 99
    instead = {0: 2, 7: 11, 9: 11, 98: 1, 99: 2}  # the last one goes round the end, where the first is bad too
    expected = [instead.get(number, number) for number in numbers]
    got = store.batch(range(100))
    assert [value(image) for image in got] == expected
    assert [value(store[i]) for i in range(-100, 0)] == expected
    assert [numbers[store.place(i)] for i in range(100)] == expected
    assert numbers[store.place(-1)] == 2
    assert store.labels is not None
    assert [store.labels[store.place(i)] for i in range(100)] == [number % 2 for number in expected]
    assert [name[-8:-4] for name, _ in store.bad] == ["0000", "0098", "0007", "0009", "0099"]
    assert all(reason == "not an image in one of these formats" for _, reason in store.bad)
    assert (store.tensor is not None) == (memory > 0 and len(sizes) == 1)
    if store.tensor is not None:
        assert torch.equal(store.tensor, torch.stack(got))
    for wrong in (100, -101):
        with pytest.raises(IndexError):
            store.place(wrong)


def test_places_are_found_before_any_image_is_asked_for(tmp_path: Path) -> None:
    store = ImageStore(folder(tmp_path, 20, bad=(4, 19)), side=32, memory=0, max_bad=0.2)
    assert [store.place(i) for i in (0, 2, 19)] == [0, 3, 0]  # even ones come first, then odd ones
    with pytest.raises(NoImagesError):
        ImageStore(folder(tmp_path / "all", 3, bad=(0, 1, 2)), side=32, memory=0, max_bad=1).place(0)


def test_copies_for_bad_images_count_as_memory(tmp_path: Path) -> None:
    """All images looked at first are bad, so nothing is known of the size of the five good ones."""
    images = folder(tmp_path, 100, bad=tuple(i for i in range(100) if i % 20 != 11), sizes=((30, 30),))
    for memory, cached in (100 * 2700 - 1, False), (100 * 2700, True):
        store = ImageStore(images, side=32, memory=memory, max_bad=1)
        assert store.cached == cached
        assert [value(store[i]) for i in (0, 55, 56, 99)] == [11, 11, 31, 11]


def test_too_many_bad_images(tmp_path: Path) -> None:
    images = folder(tmp_path, 40, bad=tuple(range(0, 40, 3)))
    with pytest.raises(TooManyBadImagesError, match="14 of 40") as caught:
        ImageStore(images, side=32)
    text = str(caught.value)
    assert text.count("not an image") == 10
    assert "... and 4 more" in text
    assert "--max-bad" in text
    bad = [(name, "not an image in one of these formats") for name in images.names if int(name[-8:-4]) % 3 == 0]
    assert len(bad) == 14
    assert caught.value.bad == pickle.loads(pickle.dumps(caught.value)).bad == bad
    assert len(ImageStore(images, side=32, max_bad=0.35)) == 40


def test_the_limit_is_exact(tmp_path: Path) -> None:
    images = folder(tmp_path, 40, bad=(1, 2))
    assert len(ImageStore(images, side=32).bad) == 2  # 5 % are allowed
    with pytest.raises(TooManyBadImagesError):
        ImageStore(images, side=32, max_bad=0.049)
    with pytest.raises(TooManyBadImagesError):
        ImageStore(images, side=32, max_bad=0)


@pytest.mark.parametrize("memory", [0, 10**9])
def test_no_good_image(tmp_path: Path, memory: int) -> None:
    images = folder(tmp_path, 3, bad=(0, 1, 2))
    with pytest.raises(TooManyBadImagesError):
        ImageStore(images, side=32, memory=memory)[0]
    with pytest.raises(NoImagesError, match="none of the 3"):
        ImageStore(images, side=32, memory=memory, max_bad=1)[0]


def test_one_image(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    store = ImageStore(open_images(tmp_path), side=2)
    assert len(store) == 1
    assert store[0].shape == (3, 2, 2)


@pytest.mark.parametrize("memory", [0, 1000])
def test_on_demand_when_memory_is_short(tmp_path: Path, memory: int) -> None:
    images = folder(tmp_path, 120, bad=(4, 6, 118))
    store = ImageStore(images, side=32, memory=memory)
    assert not store.cached
    assert store.tensor is None
    assert len(store) == 120
    assert (store.names, store.labels) == (images.names, images.labels)
    got = [value(image) for image in store.batch(range(120))]
    numbers = [int(name[-8:-4]) for name in images.names]  # 0, 2, 4, ... 118, 1, 3, ...
    expected = list(numbers)
    expected[2] = expected[3] = 8  # 4 and 6 give way to the next good one
    expected[59] = 1
    assert got == expected
    assert [name for name, _ in store.bad] == ["even/0004.png", "even/0006.png", "even/0118.png"]
    assert value(store[2]) == 8
    with pytest.raises(IndexError):
        store[120]


def test_on_demand_goes_round_the_end(tmp_path: Path) -> None:
    store = ImageStore(folder(tmp_path, 120, bad=(119,)), side=32, memory=0)
    assert value(store[119]) == value(store[-1]) == 0


def test_on_demand_limit_counts_what_was_seen(tmp_path: Path) -> None:
    images = folder(tmp_path, 240, bad=tuple(range(0, 60, 2)))  # the first 30 of 240: 12.5 %
    store = ImageStore(images, side=32, memory=0)
    store.batch(range(69))  # too few to judge
    with pytest.raises(TooManyBadImagesError, match="30 of"):
        store.batch(range(70, 240))
    patient = ImageStore(images, side=32, memory=0, max_bad=0.4)
    patient.batch(range(240))
    assert len(patient.bad) == 30


def test_on_demand_chance_alone_does_not_stop_a_run(tmp_path: Path) -> None:
    images = folder(tmp_path, 300, bad=tuple(range(0, 300, 20)))  # 5 %, just allowed
    for seed in range(5):
        store = ImageStore(images, side=32, memory=0)
        store.batch(torch.randperm(300, generator=torch.Generator().manual_seed(seed)).tolist())
        assert len(store.bad) == 15
    strict = ImageStore(images, side=32, memory=0, max_bad=0.049)
    with pytest.raises(TooManyBadImagesError, match="15 of 300"):
        strict.batch(torch.randperm(300, generator=torch.Generator().manual_seed(0)).tolist())


def test_an_estimate_that_was_too_low_is_corrected(tmp_path: Path) -> None:
    """The images looked at first are small; the others would not fit."""
    folder(tmp_path, 128)
    for i, name in enumerate(open_images(tmp_path).names):
        if i % 2:
            Image.new("L", (60, 60)).save(tmp_path / name)
    images = open_images(tmp_path)
    assert not ImageStore(images, side=64, memory=100_000).cached
    assert ImageStore(images, side=64, memory=1_000_000).cached


def test_settings_are_checked(tmp_path: Path) -> None:
    images = folder(tmp_path, 2)
    with pytest.raises(ConfigError):
        ImageStore(images, side=0)
    with pytest.raises(ConfigError):
        ImageStore(images, side=8, max_bad=5)


@pytest.mark.parametrize("memory", [0, 10**9])
def test_pickle_and_worker_processes(tmp_path: Path, memory: int) -> None:
    images = folder(tmp_path, 24, sizes=((8, 6), (6, 8)))
    store = ImageStore(images, side=32, memory=memory)
    again = pickle.loads(pickle.dumps(store))
    assert all(torch.equal(got, images[i]) for i, got in enumerate(again.batch(range(24))))
    loader = DataLoader(store, batch_size=8, num_workers=1, collate_fn=list)
    loaded = [image for batch in loader for image in batch]
    assert all(torch.equal(got, images[i]) for i, got in enumerate(loaded))


def test_kept_arrays_are_not_kept_twice() -> None:
    images = open_images("selfmask/fashion")
    store = ImageStore(images, side=224)
    assert store.tensor is not None
    assert len(pickle.dumps(store)) < store.tensor.numel() + 1_000_000


@pytest.mark.parametrize("memory", [0, 10**9])
def test_many_threads_read_one_store(tmp_path: Path, memory: int) -> None:
    images = folder(tmp_path, 120, bad=(10, 50))
    store = ImageStore(images, side=32, memory=memory)
    expected = [value(store[i]) for i in range(len(store))]
    fresh = ImageStore(images, side=32, memory=memory)
    wrong: list[object] = []

    def read(seed: int) -> None:
        order = torch.randperm(len(fresh), generator=torch.Generator().manual_seed(seed)).tolist()
        got = [value(image) for image in fresh.batch(order)]
        wrong.extend([] if got == [expected[i] for i in order] else [seed])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(fresh.bad) == 2
