"""Crop, resize, jitter and blur a batch of images, each with parameters of its own.

Own code because torchvision v2 takes one set of parameters per call: for a batch it would be a call per image.
Every operation follows torchvision's definition. Images are float32 [n, 3, height, width] from 0 to 1;
a trailing underscore means that the operation works in place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


def crop_boxes(sizes: Tensor, share: Tensor, ratio: Tensor, place: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Boxes [n, (top, left, height, width)] by the rule of `RandomResizedCrop`.

    sizes: height and width of each image, [n, 2]. share, ratio: tries [n, tries] of the box's share of the area and
    of its width / height, within `bounds`; the first that fits counts, and if none does, the largest centred box
    within the bounds. place: where the box lies in the room that it leaves, from 0 to 1, [n, 2].
    """
    height, width = sizes.double().unbind(1)
    area, ratio = (height * width)[:, None] * share.double(), ratio.double()
    tries = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()], dim=2).round_()
    fits = ((tries > 0) & (tries <= sizes[:, None])).all(2)
    first = tries[torch.arange(len(sizes)), fits.int().argmax(1)]
    centred = torch.stack([(width / bounds[0]).round(), (height * bounds[1]).round()], dim=1).minimum(sizes)
    found = fits.any(1, keepdim=True)
    extent = torch.where(found, first, centred)
    slack = sizes - extent
    start = torch.where(found, place.double() * (slack + 1), slack / 2).floor_()
    return torch.cat([start, extent], dim=1).long()


def separable(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`rows @ image @ columns^T` for every channel: any resize or blur, as one matrix [n, out, in] per direction."""
    n, channels, height, width = images.shape
    wide = torch.bmm(images.reshape(n, channels * height, width), columns.mT).view(n, channels, height, -1)
    out = images.new_empty(n, channels, rows.shape[1], columns.shape[1])
    for channel in range(channels):
        torch.bmm(rows, wide[:, channel], out=out[:, channel])
    return out


def resize_matrix(start: Tensor, length: Tensor, flip: Tensor, room: int, size: int, mode: str) -> Tensor:
    """[n, size, room]: takes `length` of `room` pixels from `start` on to `size` pixels, antialiased, or mirrored."""
    index = torch.arange(size) + 0.5
    index = torch.where(flip[:, None], size - index, index)
    scale = length[:, None] / size
    centre = start[:, None] + index * scale
    pixel = torch.arange(room) + 0.5
    weight = _filter((pixel - centre[..., None]).div_(scale[..., None].clamp(min=1)).abs_(), mode)
    weight.mul_(((pixel > start[:, None]) & (pixel < (start + length)[:, None]))[:, None])
    return weight.div_(weight.sum(-1, keepdim=True))


def _filter(distance: Tensor, mode: str) -> Tensor:
    """The kernel of a bilinear or bicubic (a = -0.5, as PIL and torch have it when antialiased) resize."""
    if mode == "bilinear":
        return distance.neg_().add_(1).clamp_(min=0)
    near = ((1.5 * distance - 2.5) * distance).mul_(distance).add_(1)
    far = ((2.5 - 0.5 * distance) * distance - 4).mul_(distance).add_(2)
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


def blur_matrix(sigma: Tensor, size: int, radius: int) -> Tensor:
    """[n, size, size]: convolves with a Gaussian of 2 * radius + 1 pixels; the border is mirrored."""
    offset = torch.arange(-radius, radius + 1)
    weight = (-0.5 * (offset / sigma[:, None]) ** 2).softmax(1)
    source = (torch.arange(size)[:, None] + offset).abs()
    source = size - 1 - (size - 1 - source).abs()
    matrix = weight.new_zeros(len(sigma), size, size)
    return matrix.scatter_add_(2, source.expand(len(sigma), -1, -1), weight[:, None].expand(-1, size, -1))


def blur(images: Tensor, sigma: Tensor, radius: int) -> Tensor:
    matrix = blur_matrix(sigma, images.shape[-1], radius)
    return separable(images, matrix, matrix)


def grey(images: Tensor) -> Tensor:
    red, green, blue = images.unbind(1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)[:, None]


def solarise(images: Tensor) -> Tensor:
    """The bright half of all values turned into its negative."""
    return torch.where(images < 0.5, images, 1 - images)


def jitter_(images: Tensor, order: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue, [n, 4] factors, one after the other in each image's `order` [n, 4]."""
    before_hue = (order == HUE).int().argmax(1)
    tones = order[order != HUE].view(-1, 3)
    strengths = factors.gather(1, tones)
    for turn in range(4):
        if len(now := (before_hue == turn).nonzero()[:, 0]):
            images[now] = shift_hue_(images[now], factors[now, HUE])
        if turn < 3:
            change_tone_(images, tones[:, turn], strengths[:, turn])
    return images


def change_tone_(images: Tensor, kind: Tensor, factor: Tensor) -> Tensor:
    """Blend each image with black (BRIGHTNESS), its mean grey (CONTRAST) or its grey self (SATURATION)."""
    kind, factor = kind.view(-1, 1, 1, 1), factor.view(-1, 1, 1, 1)
    rest = 1 - factor
    other = grey(images)
    mean = other.mean((2, 3), keepdim=True)
    other.mul_(rest * (kind == SATURATION)).add_(rest * (kind == CONTRAST) * mean)
    return images.mul_(factor).add_(other).clamp_(0, 1)


def shift_hue_(images: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of HSV, a round colour wheel, by a share of the full turn; saturation and value stay.

    With r, g, b scaled so that the least is 0 and the greatest 1, the way from red round the wheel is
    |hue| = (1 - r + g + b) / 6, on the green side where g > b; and on the way back every channel is a clipped
    tent over the hue. So no pixel needs a case distinction.
    """
    red, green, blue = images.unbind(1)
    low = torch.minimum(red, green)
    torch.minimum(low, blue, out=low)
    hue = torch.maximum(red, green)
    torch.maximum(hue, blue, out=hue)
    chroma = hue - low
    hue.sub_(red).add_(green - low).add_(blue - low)
    hue.div_(chroma.mul(6).clamp_(min=1e-9)).copysign_(green - blue)
    hue.add_(turns.view(-1, 1, 1))
    hue.sub_(hue.floor()).mul_(6)
    for channel, centre in ((red, 3), (green, 2), (blue, 4)):
        tent = hue.sub(centre).abs_()
        tent = tent.sub_(1) if channel is red else tent.neg_().add_(2)
        torch.addcmul(low, chroma, tent.clamp_(0, 1), out=channel)
    return images


def blur_radius(sigma: float, size: int) -> int:
    """Three standard deviations, within what a mirrored border allows."""
    return min(math.ceil(3 * sigma), size - 1)
