"""Features along their principal directions: what projectors start from where they do not start at random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..evaluation.whitening import scales

_FLOOR = 1e-3  # of the mean variance, added to that of each direction before it is divided by


def principal(features: Tensor) -> tuple[Tensor, Tensor]:
    """Variances along the principal directions, the largest first, and these directions as columns."""
    centred = (features - features.mean(0)).double()
    values, axes = torch.linalg.eigh(centred.T @ centred / len(centred))
    return values.flip(0).clamp(min=0).to(features.dtype), axes.flip(1).to(features.dtype)


def whitening(features: Tensor, power: float, width: int) -> Tensor:
    """The matrix whose columns are principal directions, each divided by a power of its standard deviation."""
    values, axes = principal(features)
    values, axes = values[:width], axes[:, :width]
    return axes * scales(values / values.mean(), power, floor=_FLOOR)


def whitened(features: Tensor, power: float, width: int) -> Tensor:
    """Unit vectors of centred features, each principal direction divided by a power of its standard deviation."""
    return F.normalize((features - features.mean(0)) @ whitening(features, power, width), dim=1)
