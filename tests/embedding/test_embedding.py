"""Vectors are those of a plain loop: timm's transform, one image at a time."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from selfmask import MaskConfig, get_masked_model
from selfmask.data import open_images, pixels
from selfmask.data.pixels import fit
from selfmask.embedding.vectors import embed, embed_batches
from selfmask.errors import BadImageError, ConfigError, NotABackboneError
from selfmask.preprocessing import Preprocessing

from .samples import HOW, pictures, tiny


class InMemory:
    """Images of one size, and how many were asked for."""

    def __init__(self, count: int, side: int = 24) -> None:
        self.pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
        self.asked = 0

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Tensor:
        self.asked += 1
        return self.pixels[index]


def prepared_by_timm(path: Path, preprocessing: Preprocessing) -> Tensor:
    transform = create_transform(
        (3, *preprocessing.size),
        mean=preprocessing.mean,
        std=preprocessing.std,
        interpolation=preprocessing.interpolation,
        crop_pct=1.0,
        is_training=False,
    )
    prepared: Tensor = transform(Image.open(path).convert("RGB"))
    return prepared


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [32, 48])
def test_equal_to_a_plain_loop_of_timm(tmp_path: Path, interpolation: str, size: int) -> None:
    preprocessing = Preprocessing((size, size), HOW.mean, HOW.std, interpolation)
    folder = pictures(tmp_path, 13)
    model = tiny()
    with torch.no_grad():
        expected = torch.cat(
            [model(prepared_by_timm(path, preprocessing)[None]) for path in sorted(folder.glob("*.png"))]
        )
    found, kept = embed(model, open_images(folder), preprocessing, batch_size=4)
    assert kept == list(range(13))
    assert found.dtype == torch.float32
    # Pillow and torch round pixels differently now and then, by one of 255 levels.
    assert F.cosine_similarity(found, expected).min() > 0.9999
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("height", [32, 40, 64, 65, 99])
@pytest.mark.parametrize("width", [32, 41, 64, 128])
def test_fit_is_pixel_for_pixel_timms_within_rounding(height: int, width: int) -> None:
    random = np.random.default_rng(height * width)
    smooth = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((width, height))
    transform = create_transform((3, 32, 32), interpolation="bicubic", crop_pct=1.0, is_training=False, normalize=False)
    expected = transform(smooth)
    found = fit(torch.from_numpy(np.array(smooth)).permute(2, 0, 1), Preprocessing((32, 32), (), (), "bicubic"))
    assert found.dtype == torch.uint8
    assert found.shape == expected.shape == (3, 32, 32)
    assert (found.int() - expected.int()).abs().max() <= 1


def test_fit_covers_a_target_that_is_not_square() -> None:
    preprocessing = Preprocessing((32, 48), (), (), "bilinear")
    for shape in [(32, 48), (64, 96), (100, 30), (30, 100), (33, 48), (7, 5)]:
        assert fit(torch.zeros(3, *shape, dtype=torch.uint8), preprocessing).shape == (3, 32, 48)
    # A vertical edge in the middle stays there.
    image = torch.zeros(3, 50, 200, dtype=torch.uint8)
    image[:, :, 100:] = 255
    row = fit(image, preprocessing)[0, 16].int()
    assert row[:20].max() < 40
    assert row[28:].min() > 215


def test_a_thread_of_an_image_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = pixels.resize

    def resize(images: Tensor, height: int, width: int, mode: str) -> Tensor:
        sizes.append(height * width)
        return original(images, height, width, mode)

    monkeypatch.setattr(pixels, "resize", resize)
    found = fit(torch.full((3, 2, 50_000), 7, dtype=torch.uint8), Preprocessing((224, 224), (), (), "bilinear"))
    assert max(sizes) <= 4 * 224 * 224
    assert found.shape == (3, 224, 224)
    assert bool((found == 7).all())


def test_batch_size_workers_and_source_do_not_matter(tmp_path: Path) -> None:
    images = open_images(pictures(tmp_path, 23))
    expected, _ = embed(tiny(), images, HOW, batch_size=23, workers=1)
    for batch_size, workers in ((1, 3), (5, 2), (64, 1)):
        found, kept = embed(tiny(), images, HOW, batch_size=batch_size, workers=workers)
        assert kept == list(range(23))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found, _ = embed(tiny(), [images[i] for i in range(23)], HOW)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_bad_images_are_left_out_and_named(tmp_path: Path) -> None:
    images = open_images(pictures(tmp_path, 12, bad=(0, 1, 2, 3, 7, 11)))
    expected, _ = embed(tiny(), [images[i] for i in (4, 5, 6, 8, 9, 10)], HOW)
    found, kept = embed(tiny(), images, HOW, batch_size=4)  # the first batch is bad as a whole
    assert kept == [4, 5, 6, 8, 9, 10]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    batches = list(embed_batches(tiny(), images, HOW, batch_size=4))
    assert [number for batch in batches for number, _ in batch.bad] == [0, 1, 2, 3, 7, 11]
    assert all(why for batch in batches for _, why in batch.bad)
    with pytest.raises(BadImageError):
        embed(tiny(), images, HOW, skip_bad=False)


def test_no_more_is_decoded_ahead_than_the_workers_hold() -> None:
    images = InMemory(400)
    batches = embed_batches(tiny(), images, HOW, batch_size=8, workers=2)
    for number, batch in enumerate(batches, 1):
        assert batch.indices == list(range(8 * (number - 1), 8 * number))
        assert images.asked <= 8 * (number + 2)
        if number == 10:
            break
    batches.close()
    assert images.asked <= 8 * 12
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]


def test_starting_later_gives_the_same_batches() -> None:
    images = InMemory(50)
    whole = list(embed_batches(tiny(), images, HOW, batch_size=8))
    later = list(embed_batches(tiny(), images, HOW, batch_size=8, start=16))
    assert [batch.indices for batch in later] == [batch.indices for batch in whole[2:]]
    assert all(torch.equal(a.features, b.features) for a, b in zip(later, whole[2:], strict=True))


def test_progress_counts_all_images(tmp_path: Path) -> None:
    seen = []
    embed(
        tiny(), open_images(pictures(tmp_path, 10, bad=(3,))), HOW, batch_size=4, progress=lambda *at: seen.append(at)
    )
    assert seen == [(4, 10), (8, 10), (10, 10)]


def test_modes_of_the_model_are_left_as_they_were() -> None:
    model = tiny().train()
    model.layer1.eval()
    before = {name: module.training for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found, _ = embed(model, InMemory(9), HOW)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    found.requires_grad_().square().sum().backward()  # ordinary tensors, not of inference mode


def test_a_masked_model_and_its_base() -> None:
    images, model = InMemory(9), tiny()
    plain, _ = embed(model, images, HOW)
    masked = get_masked_model(model, MaskConfig(rule="topk", active_share=0.5)).eval()
    with masked.disable_mask():
        assert torch.equal(embed(masked, images, HOW)[0], plain)
    found, _ = embed(masked, images, HOW)
    assert not torch.allclose(found, plain)
    dense, _ = embed(masked.merge_and_unload(), images, HOW)
    torch.testing.assert_close(found, dense, rtol=1e-4, atol=1e-5)


def test_half_precision_models_get_half_precision_images() -> None:
    found, _ = embed(tiny().to(torch.bfloat16), InMemory(4), HOW)
    assert found.dtype == torch.float32


def test_what_gives_no_vectors_is_refused() -> None:
    with pytest.raises(NotABackboneError, match="one vector"):
        embed(nn.Conv2d(3, 4, 3), InMemory(4), HOW)
    with pytest.raises(ConfigError, match="batch size"):
        embed(tiny(), InMemory(4), HOW, batch_size=0)
