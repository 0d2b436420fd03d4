"""Images at another size, by torch's own kernels: to the bit as torchvision does it.

It is not imported for that, because it loads torch's compiler, which takes as long as torch itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_SMOOTH = ("bilinear", "bicubic")


def resize(images: Tensor, height: int, width: int, mode: str) -> Tensor:
    """Images [..., H, W] at this size. Where they shrink, smooth modes average over all pixels (antialiasing)."""
    if images.shape[-2:] == (height, width):
        return images
    smooth = mode in _SMOOTH
    flat = images.reshape(-1, *images.shape[-3:])
    as_floats = smooth and images.dtype == torch.uint8 and images.device.type != "cpu"  # bytes are for the CPU alone
    resized = F.interpolate(
        flat.float() if as_floats else flat,
        (height, width),
        mode=mode,
        align_corners=False if smooth else None,
        antialias=smooth,
    )
    if as_floats:
        resized = resized.clamp_(0, 255).round_().to(torch.uint8)  # bicubic overshoots
    return resized.reshape(*images.shape[:-2], height, width)


def middle(images: Tensor, height: int, width: int) -> Tensor:
    """The middle of images that are at least this large."""
    top, left = (round((whole - part) / 2) for whole, part in zip(images.shape[-2:], (height, width), strict=True))
    return images[..., top : top + height, left : left + width]
