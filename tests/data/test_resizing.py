"""Resizing without torchvision, against torchvision, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as reference

from selfmask.data import open_images
from selfmask.data.resizing import middle, resize
from selfmask.preprocessing import INTERPOLATIONS

IMAGES = torch.stack([open_images("selfmask/fashion")[i] for i in range(3)])
KINDS = {
    "a batch": IMAGES,
    "one": IMAGES[0],
    "colours last in memory": IMAGES[1].permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "a part": IMAGES[2][:, 3:20, 1:26],
    "float": IMAGES.float(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", INTERPOLATIONS)
def test_every_mode_is_torchvisions(kind: str, mode: str) -> None:
    images = KINDS[kind]
    for height, width in ((64, 50), (9, 14), (40, 5), tuple(images.shape[-2:])):
        expected = reference.resize(images, [height, width], InterpolationMode(mode), antialias=True)
        assert torch.equal(resize(images, height, width, mode), expected)


def test_the_middle_is_torchvisions() -> None:
    for height, width in ((28, 28), (27, 26), (1, 14), (13, 27)):
        assert torch.equal(middle(IMAGES, height, width), reference.center_crop(IMAGES, [height, width]))
