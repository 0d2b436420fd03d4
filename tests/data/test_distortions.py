"""Distortions: each changes images a little, in its own way, and the same way again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from selfmask.data import open_images
from selfmask.data.distortions import DISTORTIONS, distorted

KINDS = len(DISTORTIONS)


def pictures(count: int) -> Tensor:
    opened = open_images("selfmask/fashion")
    return torch.stack([opened[i] for i in range(count)]).float() / 255


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", range(KINDS))
def test_a_distorted_image_is_still_nearest_to_itself(kind: int) -> None:
    images = pictures(20)
    images = images + 0.1 * torch.rand(20, 3, 1, 1, generator=seeded())  # a tint, or grey would change nothing
    images = images.clamp(0, 1)
    changed = DISTORTIONS[kind](images, seeded())
    assert changed.shape == images.shape
    assert 0 <= changed.min() <= changed.max() <= 1
    assert not torch.equal(changed, images)
    near = torch.cdist(changed.flatten(1), images.flatten(1)).argmin(1)
    assert (near == torch.arange(20)).float().mean() > 0.5
    assert torch.equal(changed, DISTORTIONS[kind](images, seeded()))


@pytest.mark.parametrize("copies", [1, 2, 3, KINDS])
def test_each_copy_of_an_image_is_distorted_in_another_way_and_all_ways_are_used(copies: int) -> None:
    images = pictures(21)
    out, kinds = distorted(images, copies, seeded())
    assert out.shape == (copies, *images.shape)
    assert all(len(set(column)) == copies for column in kinds.T.tolist())
    assert kinds.unique(return_counts=True)[1].tolist() == [3 * copies] * KINDS  # type: ignore[no-untyped-call]
    assert torch.equal(out, distorted(images, copies, seeded())[0])
    grey = kinds == [each.__name__ for each in DISTORTIONS].index("_grey")
    assert torch.equal(out[grey], images.mean(1, keepdim=True).expand_as(images).expand_as(out)[grey])


def test_more_copies_than_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="kinds"):
        distorted(pictures(2), KINDS + 1, seeded())
