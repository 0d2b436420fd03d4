"""Views: every batched operation against torchvision, image by image; boxes against torchvision's own rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torchvision.transforms.v2 as T
import torchvision.transforms.v2.functional as TF
from sklearn.datasets import load_sample_images
from torch import Tensor

from selfmask.data import image_ops as ops
from selfmask.data import views as views_module
from selfmask.data.views import DENSE_LIMIT, RATIO, MultiCrop, ViewsConfig
from selfmask.errors import ConfigError
from selfmask.preprocessing import Preprocessing

torch.set_num_threads(1)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def preprocessing(mode: str = "bilinear") -> Preprocessing:
    return Preprocessing((64, 64), MEAN, STD, mode)


def photos(count: int, height: int, width: int) -> list[Tensor]:
    """Cuts of two real photographs, in the memory layout that decoders give."""
    both = [torch.from_numpy(image.copy()).permute(2, 0, 1) for image in load_sample_images().images]
    generator = torch.Generator().manual_seed(height + width)
    cuts = []
    for index in range(count):
        top, left = (int(torch.randint(200, (), generator=generator)) for _ in range(2))
        cut = both[index % 2][:, top : top + 200, left : left + 200]
        cuts.append(TF.resize(cut, [height, width], antialias=True))
    return cuts


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def floats(count: int, size: int) -> Tensor:
    return torch.stack(photos(count, size, size)).float() / 255


# ---- boxes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(32, 32), (300, 400), (40, 500), (500, 20), (1, 1), (7, 3)])
@pytest.mark.parametrize("scale", [(0.14, 1.0), (0.05, 0.14), (0.9, 1.0)])
def test_boxes_are_torchvisions(size: tuple[int, int], scale: tuple[float, float]) -> None:
    """torchvision draws until a box fits; the same numbers, replayed as tries, must give the same box."""
    crop = T.RandomResizedCrop(8, scale=scale, ratio=RATIO)
    image = torch.zeros(3, *size, dtype=torch.uint8)
    for seed in range(40):
        torch.manual_seed(seed)
        expected = crop.make_params([image])
        torch.manual_seed(seed)
        uniform = torch.stack([torch.rand(1) for _ in range(20)]).view(10, 2)
        share = scale[0] + (scale[1] - scale[0]) * uniform[:, 0]
        low, high = map(math.log, RATIO)
        ratio = (low + (high - low) * uniform[:, 1]).exp()
        top, left, height, width = (expected[name] for name in ("top", "left", "height", "width"))
        place = torch.tensor([(top + 0.5) / (size[0] - height + 1), (left + 0.5) / (size[1] - width + 1)])
        box = ops.crop_boxes(torch.tensor([size]), share[None], ratio[None], place[None], RATIO)
        assert box.tolist() == [[top, left, height, width]]


def test_a_box_that_never_fits_is_centred() -> None:
    share, ratio, place = torch.full((2, 10), 0.95), torch.ones(2, 10), torch.zeros(2, 2)
    boxes = ops.crop_boxes(torch.tensor([[40, 500], [501, 30]]), share, ratio, place, RATIO)
    assert boxes.tolist() == [[0, 223, 40, 53], [230, 0, 40, 30]]


def test_boxes_reach_every_place() -> None:
    place = torch.tensor([[0.0, 0.0], [0.5, 0.5], [1 - 2**-24, 1 - 2**-24]])
    share, ratio = torch.full((3, 10), 0.25), torch.ones(3, 10)
    boxes = ops.crop_boxes(torch.tensor([[8, 8]] * 3), share, ratio, place, RATIO)
    assert boxes.tolist() == [[0, 0, 4, 4], [2, 2, 4, 4], [4, 4, 4, 4]]


# ---- one operation at a time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width", "size"), [(32, 32, 64), (32, 40, 16), (90, 61, 24), (8, 8, 8)])
def test_batched_resize_is_torchvisions(mode: str, height: int, width: int, size: int) -> None:
    images = torch.stack(photos(6, height, width)).float() / 255
    boxes = torch.tensor([[0, 0, height, width], [1, 2, 5, 5], [3, 0, 4, 8], [0, 1, 8, 3], [2, 2, 1, 1], [1, 1, 6, 7]])
    flips = torch.tensor([False, True, False, True, False, True])
    rows = ops.resize_matrix(boxes[:, 0], boxes[:, 2], torch.zeros(6, dtype=torch.bool), height, size, mode)
    columns = ops.resize_matrix(boxes[:, 1], boxes[:, 3], flips, width, size, mode)
    ours = ops.separable(images, rows, columns)
    for image, box, flip, view in zip(images, boxes.tolist(), flips, ours, strict=True):
        expected = TF.resized_crop(image, *box, [size, size], mode, antialias=True)
        torch.testing.assert_close(view, expected.flip(-1) if flip else expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        (ops.BRIGHTNESS, TF.adjust_brightness),
        (ops.CONTRAST, TF.adjust_contrast),
        (ops.SATURATION, TF.adjust_saturation),
    ],
)
def test_tones_are_torchvisions(kind: int, reference: Any) -> None:
    images, factors = floats(5, 48), torch.tensor([0.0, 0.2, 1.0, 1.4, 1.8])
    ours = ops.change_tone_(images.clone(), torch.full((5,), kind), factors)
    expected = [reference(image, factor) for image, factor in zip(images, factors.tolist(), strict=True)]
    torch.testing.assert_close(ours, torch.stack(expected), atol=1e-6, rtol=0)


def test_hue_is_torchvisions_on_photographs_and_pure_colours() -> None:
    pure = torch.tensor(list(itertools.product([0.0, 0.25, 0.5, 1.0], repeat=3))).T.reshape(3, 8, 8)
    images = torch.cat([floats(6, 48), pure.repeat(1, 6, 6)[None]])
    turns = torch.tensor([-0.5, -0.2, -0.07, 0.0, 0.13, 0.2, 0.5])
    for shift in range(7):
        rolled = turns.roll(shift)
        ours = ops.shift_hue_(images.clone(), rolled)
        expected = [TF.adjust_hue(image, turn) for image, turn in zip(images, rolled.tolist(), strict=True)]
        torch.testing.assert_close(ours, torch.stack(expected), atol=3e-6, rtol=0)


def test_jitter_follows_each_images_own_order() -> None:
    orders = torch.tensor(list(itertools.permutations(range(4))))
    images = floats(len(orders), 24)
    low, high = torch.tensor([0.2, 0.2, 0.2, -0.2]), torch.tensor([1.8, 1.8, 1.8, 0.2])
    factors = low + (high - low) * torch.rand(len(orders), 4, generator=generator(3))
    steps = [TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue]
    ours = ops.jitter_(images.clone(), orders, factors)
    for image, order, factor, view in zip(images, orders.tolist(), factors.tolist(), ours, strict=True):
        for step in order:
            image = steps[step](image, factor[step])
        torch.testing.assert_close(view, image, atol=2e-5, rtol=0)


def test_grey_is_torchvisions() -> None:
    images = floats(3, 24)
    torch.testing.assert_close(ops.grey(images), TF.rgb_to_grayscale(images), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("size", "radius"), [(64, 2), (96, 6), (8, 7)])
def test_blur_is_torchvisions(size: int, radius: int) -> None:
    images, sigmas = floats(4, size), torch.tensor([0.01, 0.3, 1.0, 2.0])
    ours = ops.blur(images, sigmas, radius)
    for image, sigma, view in zip(images, sigmas.tolist(), ours, strict=True):
        expected = TF.gaussian_blur(image, [2 * radius + 1] * 2, [sigma] * 2)
        torch.testing.assert_close(view, expected, atol=2e-6, rtol=0)


# ---- all of them ---------------------------------------------------------------------------------------------


def one_by_one(config: ViewsConfig, images: Sequence[Tensor], uniform: Tensor, mode: str) -> list[Tensor]:
    """The views made the plain way: torchvision on one image and one crop at a time."""
    views = []
    for crop in range(config.large + config.small):
        size, scale = (
            (config.size, config.large_scale) if crop < config.large else (config.small_size, config.small_scale)
        )
        done = []
        for image, u in zip(images, uniform[:, crop].tolist(), strict=True):
            height, width = image.shape[1:]
            box = None
            for area, ratio in zip(u[:10], u[10:20], strict=True):
                target = height * width * (scale[0] + (scale[1] - scale[0]) * area)
                aspect = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * ratio)
                w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
                if 0 < w <= width and 0 < h <= height:
                    box = [int(u[20] * (height - h + 1)), int(u[21] * (width - w + 1)), h, w]
                    break
            assert box is not None
            if max(height, width) > DENSE_LIMIT:  # resized in 8 bits
                view = TF.resized_crop(image, *box, [size, size], mode, antialias=True) / 255
            else:
                view = TF.resized_crop(image.float() / 255, *box, [size, size], mode, antialias=True).clamp(0, 1)
            if u[22] < config.flip_p:
                view = TF.horizontal_flip(view)
            if u[23] < config.jitter_p:
                for step in sorted(range(4), key=lambda i, u=u: u[24 + i]):
                    strength = config.jitter[step]
                    low = -strength if step == 3 else max(0, 1 - strength)
                    factor = low + ((0 if step == 3 else 1) + strength - low) * u[28 + step]
                    name = ("brightness", "contrast", "saturation", "hue")[step]
                    view = getattr(TF, f"adjust_{name}")(view, factor)
            if u[32] < config.grey_p:
                view = TF.rgb_to_grayscale(view, 3)
            if u[33] < config.blur_p:
                low, high = (s * config.size / 224 for s in config.blur_sigma)
                kernel = 2 * math.ceil(3 * high) + 1
                view = TF.gaussian_blur(view, [kernel] * 2, [low + (high - low) * u[34]] * 2)
            done.append(TF.normalize(view, list(MEAN), list(STD)))
        views.append(torch.stack(done))
    return views


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("kind", ["small", "large", "mixed"])
def test_views_are_those_of_torchvision_one_by_one(kind: str, mode: str) -> None:
    small, large = photos(6, 32, 32), photos(6, 120, 150)
    images = {"small": small, "large": large, "mixed": small[:3] + large[:3] + photos(2, 50, 40)}[kind]
    config = ViewsConfig(size=64, small=3)
    crops = MultiCrop(config, preprocessing(mode))
    draws = crops.draw(len(images), generator(5))
    expected = one_by_one(config, images, draws.uniform, mode)
    ours = crops(images, draws)
    assert [view.shape[-1] for view in ours] == [64, 64, 32, 32, 32]
    for view, other in zip(ours, expected, strict=True):
        assert view.dtype == torch.float32
        assert view.is_contiguous()
        torch.testing.assert_close(view, other, atol=2e-4, rtol=0)


def test_views_do_not_depend_on_the_rest_of_the_batch() -> None:
    images = photos(5, 32, 32) + photos(4, 110, 140) + photos(3, 96, 40)
    crops = MultiCrop(ViewsConfig(size=48, small=2), preprocessing())
    draws = crops.draw(len(images), generator())
    whole = crops(images, draws)
    for part in (slice(0, 6), slice(6, 12), slice(3, 4)):
        for view, expected in zip(crops(images[part], draws[part]), whole, strict=True):
            assert torch.equal(view, expected[part])


def test_chunks_do_not_change_views(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(7, 32, 32)
    crops = MultiCrop(ViewsConfig(size=32, small=2), preprocessing())
    draws = crops.draw(7, generator())
    whole = crops(images, draws)
    monkeypatch.setattr(views_module, "CHUNK", 2 * 32 * 32)
    for view, expected in zip(crops(images, draws), whole, strict=True):
        assert torch.equal(view, expected)


def test_the_same_draws_give_the_same_views_and_leave_the_images_alone() -> None:
    images = photos(4, 32, 32) + photos(2, 110, 110)
    before = [image.clone() for image in images]
    crops = MultiCrop(ViewsConfig(size=32), preprocessing())
    first, again = (crops(images, crops.draw(6, generator(1))) for _ in range(2))
    other = crops(images, crops.draw(6, generator(2)))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(images, before, strict=True))


def test_draws_of_a_slice_are_the_slice_of_the_draws() -> None:
    crops = MultiCrop(ViewsConfig(size=32), preprocessing())
    draws = crops.draw(10, generator())
    assert len(draws) == 10
    assert len(draws[4:]) == 6
    assert torch.equal(draws[4:].uniform, draws.uniform[4:])
    assert not torch.equal(draws[0:1].uniform, draws[1:2].uniform)


@pytest.mark.parametrize(("name", "rate"), [("flip_p", 0.5), ("jitter_p", 0.8), ("grey_p", 0.2), ("blur_p", 0.5)])
def test_things_happen_as_often_as_asked_for(name: str, rate: float) -> None:
    """In 2,000 crops that would otherwise show the whole image, within four standard deviations."""
    never = {"jitter_p": 0.0, "grey_p": 0.0, "blur_p": 0.0, "flip_p": 0.0}
    image = photos(1, 16, 16)[0]
    whole: dict[str, Any] = {"size": 16, "large": 1, "small": 0, "large_scale": (1.0, 1.0), "blur_sigma": (9.0, 9.0)}
    crops = MultiCrop(ViewsConfig(**whole, **{**never, name: rate}), preprocessing())
    draws = crops.draw(2000, generator(9))
    (views,) = crops([image] * 2000, draws)
    (still,) = MultiCrop(ViewsConfig(**whole, **never), preprocessing())([image] * 2000, draws)
    changed = (views - still).abs().flatten(1).amax(1) > 1e-3
    assert abs(changed.float().mean().item() - rate) < 4 * math.sqrt(rate * (1 - rate) / 2000)


# ---- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"size": 4},
        {"size": 64.0},
        {"small_size": 0},
        {"large": 0},
        {"small": -1},
        {"large_scale": (0.5, 0.1)},
        {"small_scale": (0.0, 0.1)},
        {"large_scale": (0.5, 1.5)},
        {"jitter": (0.8, 0.8, 0.8)},
        {"jitter": (0.8, 0.8, 0.8, 0.6)},
        {"jitter": (float("nan"), 0.8, 0.8, 0.1)},
        {"jitter_p": 1.5},
        {"grey_p": "often"},
        {"blur_sigma": (0.0, 1.0)},
        {"blur_sigma": (0.1, float("inf"))},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ViewsConfig(**settings)


def test_small_crops_scale_with_large_ones() -> None:
    assert [ViewsConfig(size=size).small_size for size in (224, 160, 64, 32)] == [96, 72, 32, 16]
    assert ViewsConfig(large_scale=[0.2, 0.9]) == ViewsConfig(large_scale=(0.2, 0.9))  # type: ignore[arg-type]


def test_wrong_images_are_refused() -> None:
    crops = MultiCrop(ViewsConfig(size=32), preprocessing())
    draws = crops.draw(2, generator())
    for wrong in (
        torch.zeros(3, 8, 8),
        torch.zeros(1, 8, 8, dtype=torch.uint8),
        torch.zeros(3, 0, 8, dtype=torch.uint8),
    ):
        with pytest.raises(ConfigError, match="RGB"):
            crops([wrong] * 2, draws)
    for few in (photos(3, 8, 8), []):
        with pytest.raises(ConfigError, match="draws"):
            crops(few, draws)
    with pytest.raises(ConfigError, match="draws"):
        MultiCrop(ViewsConfig(small=1), preprocessing())(photos(2, 8, 8), draws)
    with pytest.raises(ConfigError, match="interpolation"):
        MultiCrop(ViewsConfig(), preprocessing("nearest"))


def test_tiny_and_narrow_images_give_views() -> None:
    images = [torch.randint(0, 256, (3, h, w), dtype=torch.uint8) for h, w in ((1, 1), (2, 90), (1, 300), (300, 1))]
    crops = MultiCrop(ViewsConfig(size=32), preprocessing("bicubic"))
    for view in crops(images, crops.draw(4, generator())):
        assert view.isfinite().all()


# ---- solarise ------------------------------------------------------------------------------------------------


def test_solarise_is_torchvisions() -> None:
    images = floats(4, 24)
    expected = torch.stack([TF.solarize(image, threshold=0.5) for image in images])
    torch.testing.assert_close(ops.solarise(images), expected)


def test_solarise_happens_as_often_as_said_and_changes_no_other_draw() -> None:
    images = photos(40, 20, 20)
    quiet = {"size": 16, "large": 1, "small": 0, "jitter_p": 0.0, "grey_p": 0.0, "blur_p": 0.0}
    never, always = (MultiCrop(ViewsConfig(**quiet, solarise_p=p), preprocessing()) for p in (0.0, 1.0))
    draws = always.draw(40, generator())
    (solarised,) = always(images, draws)
    (plain,) = never(images, type(draws)(draws.uniform[..., :-1]))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))
    torch.testing.assert_close(solarised * std + mean, ops.solarise(plain * std + mean), atol=1e-6, rtol=0)
    half = MultiCrop(ViewsConfig(**quiet, solarise_p=0.5), preprocessing())
    (some,) = half(images, draws)
    changed = [not torch.equal(a, b) for a, b in zip(some, plain, strict=True)]
    assert 8 < sum(changed) < 32
