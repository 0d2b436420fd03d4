"""Multi-crop views: several random crops of every image, large ones and small ones, as SwAV makes them."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import ConfigError
from ..preprocessing import Preprocessing
from . import image_ops as ops
from .resizing import resize

REFERENCE_SIZE = 224  # of a large crop, in pixels; the blur's sigma and the small crops are given for it
TRIES = 10  # of a random box before the centred one is taken
RATIO = (3 / 4, 4 / 3)  # of a box's width to its height
DENSE_LIMIT = 96  # pixels a side; up to here, one batched matrix product resizes faster than a call per image
CHUNK = 1 << 18  # pixels worked on at a time: fewer cost calls, many more no longer stay in the cache

_UNCHANGED = torch.tensor([1.0, 1.0, 1.0, 0.0])  # factors of brightness, contrast, saturation and hue
_LEAST = torch.tensor([0.0, 0.0, 0.0, -0.5])
_NUMBERS = {
    "share": TRIES,
    "ratio": TRIES,
    "place": 2,
    "flip": 1,
    "jitter": 1,
    "order": 4,
    "factors": 4,
    "grey": 1,
    "blur": 1,
    "sigma": 1,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewsConfig:
    """Augmented views of an image; the defaults are those of SwAV and of the paper.

    size: height and width of a large crop, in pixels.
    small_size: height and width of a small crop; by default 96/224 of a large one, rounded up to a multiple of 8.
    large: number of large crops per image.
    small: number of small crops per image.
    large_scale: range of the share of the image's area that a large crop covers.
    small_scale: range of the share of the image's area that a small crop covers.
    jitter: strength of colour jitter: brightness, contrast, saturation, hue.
    jitter_p: probability of colour jitter.
    grey_p: probability of conversion to greyscale.
    blur_p: probability of Gaussian blur.
    solarise_p: probability of solarisation.
    flip_p: probability of a horizontal flip.
    blur_sigma: range of the blur's standard deviation at `size` 224; it scales with `size`.
    """

    size: int = REFERENCE_SIZE
    small_size: int | None = None
    large: int = 2
    small: int = 6
    large_scale: tuple[float, float] = (0.14, 1.0)
    small_scale: tuple[float, float] = (0.05, 0.14)
    jitter: tuple[float, float, float, float] = (0.8, 0.8, 0.8, 0.2)
    jitter_p: float = 0.8
    grey_p: float = 0.2
    blur_p: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarise_p: float = 0.0
    flip_p: float = 0.5

    def __post_init__(self) -> None:
        _whole("size", self.size, 8)
        if self.small_size is None:
            object.__setattr__(self, "small_size", math.ceil(self.size * 96 / REFERENCE_SIZE / 8) * 8)
        _whole("small_size", self.small_size, 8)
        _whole("large", self.large, 1)
        _whole("small", self.small, 0)
        for name, limit in (("large_scale", 1.0), ("small_scale", 1.0), ("blur_sigma", math.inf)):
            pair = _numbers(name, getattr(self, name), 2)
            if not 0 < pair[0] <= pair[1] <= limit or math.isinf(pair[1]):
                raise ConfigError(f"{name} is not a valid range", expected=f"0 < low <= high <= {limit}", found=pair)
            object.__setattr__(self, name, pair)  # a tuple, also where JSON gave a list
        jitter = _numbers("jitter", self.jitter, 4)
        if not (all(0 <= strength < math.inf for strength in jitter) and jitter[3] <= 0.5):
            raise ConfigError("jitter is out of range", expected="0 or more, the last at most 0.5", found=jitter)
        object.__setattr__(self, "jitter", jitter)
        for name in ("jitter_p", "grey_p", "blur_p", "solarise_p", "flip_p"):
            (value,) = _numbers(name, [getattr(self, name)], 1)
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} is out of range", expected="0 to 1", found=value)

    def changed(self, **changes: Any) -> Self:
        """With some settings changed; small crops keep the default proportion to large ones, unless it is given."""
        if "size" in changes:
            changes = {"small_size": None, **changes}
        return dataclasses.replace(self, **changes)

    @property
    def numbers(self) -> dict[str, int]:
        """The uniform numbers that one crop of one image needs, in order; none for what never happens."""
        return _NUMBERS | ({"solarise": 1} if self.solarise_p else {})

    @property
    def groups(self) -> list[tuple[slice, int, tuple[float, float]]]:
        """Which crops are alike, with their size and scale: the large ones come first."""
        assert self.small_size is not None
        total = self.large + self.small
        large = slice(0, self.large), self.size, self.large_scale
        return [large, (slice(self.large, total), self.small_size, self.small_scale)] if self.small else [large]


@dataclasses.dataclass(frozen=True)
class Draws:
    """All the chance in the views of n images: uniform numbers [n, crops, ...], whatever the images are."""

    uniform: Tensor

    def __len__(self) -> int:
        return len(self.uniform)

    def __getitem__(self, images: slice) -> Draws:
        return Draws(self.uniform[images])


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What the draws mean for some images: one row each."""

    boxes: Tensor
    flip: Tensor
    jitter: Tensor
    order: Tensor
    factors: Tensor
    grey: Tensor
    blur: Tensor
    sigma: Tensor
    solarise: Tensor

    def __getitem__(self, rows: slice) -> _Plan:
        return _Plan(**{name: values[rows] for name, values in vars(self).items()})


class MultiCrop:
    """Makes the views. Chance is drawn apart, so that processes can share one draw and a step can be repeated.

    >>> crops = MultiCrop(ViewsConfig(size=64), preprocessing)
    >>> views = crops(images, crops.draw(len(images), generator))
    """

    def __init__(self, config: ViewsConfig, preprocessing: Preprocessing) -> None:
        if preprocessing.interpolation not in ("bilinear", "bicubic"):
            raise ConfigError(
                "views cannot be made with this interpolation",
                expected="bilinear or bicubic",
                found=preprocessing.interpolation,
                todo="pass a Preprocessing with one of these interpolations",
            )
        self.config = config
        self._mode = preprocessing.interpolation
        self._mean, self._std = (
            torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std)
        )

    def draw(self, n: int, generator: torch.Generator) -> Draws:
        """The random numbers for n images. What an image looks like does not matter, only its place in the batch."""
        numbers = sum(self.config.numbers.values())
        return Draws(torch.rand(n, self.config.large + self.config.small, numbers, generator=generator))

    def __call__(self, images: Sequence[Tensor], draws: Draws) -> list[Tensor]:
        """The views of uint8 images [3, height, width]: one float32 tensor [n, 3, size, size] a crop, normalised.

        Images that lie in memory as decoders leave them (height, width, channel) are resized fastest.
        """
        self._check(images, draws)
        views: list[Tensor] = []
        for crops, size, scale in self.config.groups:
            plan = self._plan(images, draws.uniform[:, crops], scale)
            many = list(images) * (crops.stop - crops.start)
            out, chunk = torch.empty(len(many), 3, size, size), max(1, CHUNK // size**2)
            for start in range(0, len(many), chunk):
                part = slice(start, start + chunk)
                self._resize(many[part], plan[part], out[part])
                self._colour(plan[part], out[part])
            views += out.view(-1, len(images), 3, size, size).unbind()
        return views

    def _check(self, images: Sequence[Tensor], draws: Draws) -> None:
        crops = self.config.large + self.config.small
        if not images or draws.uniform.shape[:2] != (len(images), crops):
            expected = f"at least one image, and draws for {len(images)} image(s) and {crops} crops"
            raise ConfigError("images and draws do not match", expected=expected, found=len(draws))
        for image in images:
            if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3 or not image.numel():
                found = f"{image.dtype} {list(image.shape)}"
                raise ConfigError(
                    "views can only be made from RGB images", expected="uint8 [3, height, width]", found=found
                )

    def _plan(self, images: Sequence[Tensor], uniform: Tensor, scale: tuple[float, float]) -> _Plan:
        """What will happen in the crops of one size, crop after crop."""
        config = self.config
        parts = torch.split(uniform.transpose(0, 1).flatten(0, 1), list(config.numbers.values()), dim=1)
        number = dict(zip(config.numbers, parts, strict=True))
        sizes = torch.tensor([image.shape[1:] for image in images]).repeat(uniform.shape[1], 1)
        log_ratio = _within(number["ratio"], *map(math.log, RATIO))
        boxes = ops.crop_boxes(sizes, _within(number["share"], *scale), log_ratio.exp(), number["place"], RATIO)
        spread = torch.tensor(config.jitter)
        factors = _within(number["factors"], (_UNCHANGED - spread).clamp(min=_LEAST), _UNCHANGED + spread)
        sigma = _within(number["sigma"][:, 0], *config.blur_sigma) * (config.size / REFERENCE_SIZE)
        never = torch.ones(len(sizes), 1)
        happens = {
            name: number.get(name, never)[:, 0] < probability
            for name, probability in (
                ("flip", config.flip_p),
                ("jitter", config.jitter_p),
                ("grey", config.grey_p),
                ("blur", config.blur_p),
                ("solarise", config.solarise_p),
            )
        }
        return _Plan(boxes, order=number["order"].argsort(1), factors=factors, sigma=sigma, **happens)

    def _resize(self, images: Sequence[Tensor], plan: _Plan, out: Tensor) -> None:
        """Cut and resize into `out`. How, is decided by each image alone, so that its views never depend on others."""
        size = out.shape[-1]
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, image in enumerate(images):
            height, width = image.shape[1:]
            if max(height, width) <= DENSE_LIMIT:
                groups[height, width].append(index)
                continue
            top, left, high, wide = plan.boxes[index].tolist()
            view = resize(image[:, top : top + high, left : left + wide], size, size, self._mode)
            torch.div(view.flip(-1) if plan.flip[index] else view, 255, out=out[index])
        for (height, width), members in groups.items():
            batch = torch.stack([images[index] for index in members]).float().div_(255)
            top, left, high, wide = plan.boxes[members].unbind(1)
            flip = plan.flip[members]
            rows = ops.resize_matrix(top, high, torch.zeros_like(flip), height, size, self._mode)
            columns = ops.resize_matrix(left, wide, flip, width, size, self._mode)
            out[members] = ops.separable(batch, rows, columns).clamp_(0, 1)  # bicubic overshoots

    def _colour(self, plan: _Plan, images: Tensor) -> None:
        """Jitter, grey, blur, solarise and normalise, in place."""
        if len(chosen := plan.jitter.nonzero()[:, 0]):
            images[chosen] = ops.jitter_(images[chosen], plan.order[chosen], plan.factors[chosen])
        if len(chosen := plan.grey.nonzero()[:, 0]):
            images[chosen] = ops.grey(images[chosen]).expand(-1, 3, -1, -1)
        if len(chosen := plan.blur.nonzero()[:, 0]):
            radius = ops.blur_radius(self.config.blur_sigma[1] * self.config.size / REFERENCE_SIZE, images.shape[-1])
            images[chosen] = ops.blur(images[chosen], plan.sigma[chosen], radius)
        if len(chosen := plan.solarise.nonzero()[:, 0]):
            images[chosen] = ops.solarise(images[chosen])
        images.sub_(self._mean).div_(self._std)


def _within(uniform: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    return low + (high - low) * uniform


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is out of range", expected=f"a whole number, {least} or more", found=repr(value))


def _numbers(name: str, value: object, count: int) -> tuple[float, ...]:
    if not isinstance(value, Sequence) or len(value) != count or not all(map(_is_number, value)):
        raise ConfigError(f"{name} must be {count} number(s)", found=repr(value))
    return tuple(float(number) for number in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
