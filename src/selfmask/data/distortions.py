"""Distortions that tell how well a model recognises images: none of them is among the views that it is trained on.

Images are float32 [n, 3, height, width] from 0 to 1; chance comes from a generator, so that it can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_NOISE = 0.08
_ANGLE = math.radians(20)
_SHIFT = 0.125  # of the side
_CUT = 3  # the side of the patch that is cut out is a third of the image's
_DIM = 0.6, 1.7  # exponents


def distorted(images: Tensor, copies: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`copies` of each image [copies, n, ...], no two with the same kind of distortion, and the kinds [copies, n]."""
    if copies > len(DISTORTIONS):
        raise ValueError(f"there are {len(DISTORTIONS)} kinds, not {copies}")
    first, step = torch.arange(len(images)), len(DISTORTIONS) // copies
    kinds = torch.stack([(first + step * copy) % len(DISTORTIONS) for copy in range(copies)])
    out = images.repeat(copies, 1, 1, 1, 1)
    for kind, distort in enumerate(DISTORTIONS):
        for copy in range(copies):
            some = kinds[copy] == kind
            if some.any():
                out[copy, some] = distort(images[some], generator)
    return out, kinds


def _noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    return (images + _NOISE * torch.randn(images.shape, generator=generator)).clamp(0, 1)


def _blurred(images: Tensor, _: torch.Generator) -> Tensor:
    return F.interpolate(F.avg_pool2d(images, 2), images.shape[-2:], mode="bilinear")


def _rotated(images: Tensor, generator: torch.Generator) -> Tensor:
    angle = _ANGLE * (2 * torch.rand(len(images), generator=generator) - 1)
    none = torch.zeros_like(angle)
    turn = torch.stack([angle.cos(), -angle.sin(), none, angle.sin(), angle.cos(), none], 1).view(-1, 2, 3)
    return _warped(images, turn)


def _cut(images: Tensor, generator: torch.Generator) -> Tensor:
    """A square of the image is replaced by its mean."""
    side = images.shape[-1] // _CUT
    places = torch.randint(images.shape[-1] - side + 1, (len(images), 2), generator=generator)
    images = images.clone()
    for image, (top, left) in zip(images, places.tolist(), strict=True):
        image[:, top : top + side, left : left + side] = image.mean()
    return images


def _shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    move = 2 * _SHIFT * (2 * torch.rand(len(images), 2, 1, generator=generator) - 1)  # the side is 2 long
    return _warped(images, torch.cat([torch.eye(2).expand(len(images), 2, 2), move], 2))


def _grey(images: Tensor, _: torch.Generator) -> Tensor:
    return images.mean(1, keepdim=True).expand_as(images)


def _dimmed(images: Tensor, generator: torch.Generator) -> Tensor:
    """Or brightened."""
    darker, brighter = max(_DIM), min(_DIM)
    return images ** torch.where(torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5, brighter, darker)


def _warped(images: Tensor, matrices: Tensor) -> Tensor:
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


DISTORTIONS: tuple[Callable[[Tensor, torch.Generator], Tensor], ...] = (
    _noisy,
    _blurred,
    _rotated,
    _cut,
    _shifted,
    _grey,
    _dimmed,
)
