"""What is reported of predictions: accuracies, overall and class by class, and how sure they are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from scipy.special import stdtrit  # type: ignore[import-untyped]
from torch import Tensor

from ..errors import LabelsError

TOP = 5
_SURE = 0.95


@dataclasses.dataclass(frozen=True)
class Scores:
    """How well predictions fit the truth.

    top1, top5: the share of images whose class is the first, or among the first five, of the prediction. With five
    classes or fewer every class is among the first five, so that top5 is 1 by definition.
    per_class: the share of each class's images that are right (top-1), for the classes that the truth has.
    confusion: [true class][predicted class], in the order of the classes: how many images.
    """

    top1: float
    top5: float
    per_class: dict[str, float]
    confusion: list[list[int]]


def score(ranked: Tensor, truth: Tensor, classes: Sequence[str]) -> Scores:
    """`ranked` [n, r] has predicted class numbers, the best first; -1 where a prediction has no more to say."""
    count = len(classes)
    if ranked.ndim != 2 or truth.ndim != 1 or len(ranked) != len(truth) or not ranked.numel():
        raise LabelsError(
            "the predictions do not match the labels", expected=list(truth.shape), found=list(ranked.shape)
        )
    ranked, truth = ranked.cpu().long(), truth.cpu().long()
    if int(truth.min()) < 0 or int(truth.max()) >= count or int(ranked[:, 0].min()) < 0 or int(ranked.max()) >= count:
        raise LabelsError("some class numbers do not match any class", expected=f"0 to {count - 1}")
    confusion = torch.bincount(truth * count + ranked[:, 0], minlength=count**2).view(count, count)
    right, images = confusion.diagonal().tolist(), confusion.sum(1).tolist()
    hits = (ranked[:, :TOP] == truth[:, None]).any(1)
    return Scores(
        top1=sum(right) / len(truth),
        top5=1.0 if count <= TOP else float(hits.double().mean()),
        per_class={name: right[i] / images[i] for i, name in enumerate(classes) if images[i]},
        confusion=confusion.tolist(),
    )


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half the width of its 95 % interval over seeds (Student's t); None for one value, which tells none."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, float(stdtrit(len(values) - 1, (1 + _SURE) / 2)) * math.sqrt(variance / len(values))
