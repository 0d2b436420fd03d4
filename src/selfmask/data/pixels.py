"""From decoded images to what a backbone takes: resized, cropped and normalised."""

from __future__ import annotations

from torch import Tensor

from ..preprocessing import Preprocessing
from .resizing import middle, resize

_LONGEST = 4  # an image longer than this many times its shorter side is cropped first: resizing it could fill memory


def fit(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Resize uint8 images of one shape [..., 3, H, W] so that they just cover the target, and keep the middle.

    This is what timm does for evaluation with `crop_pct` 1, on tensors.
    """
    height, width = images.shape[-2:]
    if max(height, width) > _LONGEST * min(height, width):
        longest = _LONGEST * min(height, width)
        images = middle(images, min(height, longest), min(width, longest))
        height, width = images.shape[-2:]
    wanted_height, wanted_width = preprocessing.size
    if height * wanted_width <= width * wanted_height:
        covering = wanted_height, width * wanted_height // height
    else:
        covering = height * wanted_width // width, wanted_width
    return middle(resize(images, *covering, preprocessing.interpolation), wanted_height, wanted_width)


def normalised(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Images of 0 to 255 as the backbone wants them; those in float32 are changed in place."""
    pixels = images.float()
    mean, std = (pixels.new_tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    return pixels.mul_(1 / (255 * std)).sub_(mean / std)
