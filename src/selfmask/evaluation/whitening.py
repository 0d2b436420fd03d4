"""Whitening: how much each principal direction of vectors is stretched, by its variance alone.

Cosine similarity listens to directions of large variance, whatever they mean. Divided by its standard deviation to a
power, a direction has its say: with power 0 vectors are only centred, with 1 all directions weigh the same. This is the
one place of the formula: the map (`feature_map.py`), cascades and the gate's quality use it.
"""

from __future__ import annotations

import torch
from torch import Tensor

POWERS = (0.5, 0.25, 0.0)
"""To choose from, where nobody says one."""
DIRECTIONS = 150
"""At work at once, at most: of more, a few labels cannot tell which matter (docs/whitening.md)."""
_LEAST = 1e-12  # of the largest variance; with less, or with less than the next, a direction is taken by no image
_NONE = 1e-30


def scales(variances: Tensor, power: float, *, floor: float = 0.0) -> Tensor:
    """What each direction is multiplied by: (its variance + `floor` times the mean one) ^ (-power / 2).

    0 for directions that no image takes: what lies along them is chance alone.
    """
    raised = (variances + floor * variances.mean()).clamp(min=_NONE) ** (-power / 2)
    return torch.where(variances > (_LEAST * variances.max()).clamp(min=_NONE), raised, 0.0)


def shrinkage(variances: Tensor, count: int) -> float:
    """How far to draw variances, measured on `count` images, towards their mean: a share from 0 to 1.

    Of few images, large variances are found too large and small ones too small, and with fewer images than dimensions
    some are 0. This is the oracle-approximating shrinkage (Chen et al. 2010), which needs nothing but the variances.
    """
    width, square, mean = len(variances), float(variances.square().mean()), float(variances.mean())
    square /= width  # the mean square of all entries of the covariance
    apart = (count + 1) * (square - mean**2 / width)
    return 1.0 if apart <= 0 else min(1.0, (square + mean**2) / apart)


def shrunk(variances: Tensor, share: float) -> Tensor:
    """Variances, drawn towards their mean by a share."""
    return (1 - share) * variances + share * variances.mean()


def directions(variances: Tensor, power: float) -> float:
    """How many directions are at work after whitening: (sum of variances)^2 / sum of their squares."""
    after = variances * scales(variances, power).square()
    return float(after.sum().square() / after.square().sum().clamp(min=_NONE))


def chosen_power(variances: Tensor) -> float:
    """As much whitening as leaves no more than `DIRECTIONS` at work: chosen by the variances alone, without labels."""
    return next((power for power in POWERS if directions(variances, power) <= DIRECTIONS), POWERS[-1])
