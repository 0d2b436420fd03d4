"""What every evaluation takes: features and labels that are what they should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import EvaluationError, LabelsError

OnProgress = Callable[[float], None]
"""Called with the share of the work that is done."""


def as_labels(labels: Tensor | Sequence[int], features: Tensor, whose: str) -> Tensor:
    """Labels as a tensor, one for each row of features."""
    numbers = torch.as_tensor(labels)
    if numbers.ndim != 1 or len(numbers) != len(features) or numbers.is_floating_point():
        raise LabelsError(
            f"the labels do not match {whose}",
            expected=f"{len(features)} whole numbers",
            found=f"{numbers.dtype} of shape {list(numbers.shape)}",
        )
    return numbers.long()


def check_features(features: Tensor, whose: str) -> Tensor:
    """Features as float32 rows, none missing and all finite."""
    if features.ndim != 2 or 0 in features.shape:
        raise EvaluationError(
            f"there are no vectors of {whose}", expected="one row per image", found=list(features.shape)
        )
    features = features.float()
    finite = lengths_of(features).isfinite()  # of the length: to ask every number takes as much memory as they do
    if not bool(finite.all()):
        raise EvaluationError(
            f"some vectors of {whose} are not finite",
            found=f"{int((~finite).sum())} of {len(features)} rows with NaN, infinite or overflowing values",
            todo="check the run's log: a mask whose loss became NaN cannot be used",
        )
    return features


def lengths_of(rows: Tensor) -> Tensor:
    """The length of each row."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return lengths
