"""Linear probes: how well a linear classifier on frozen features does, with all labels or with few."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from ..data.splits import label_split
from ..errors import LabelsError
from .inputs import OnProgress, as_labels, check_features
from .logistic import solve
from .metrics import TOP

PENALTY = 0.01  # the recipe's lambda, times the number of images
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # to choose from
_HELD_BACK = 0.2  # of the labels, to choose with

Labels = Tensor | Sequence[int]


@dataclasses.dataclass(frozen=True)
class LinearProbe:
    """A linear classifier of L2-normalised features: scores are `weight` [C, F] times a vector, plus `bias` [C].

    classes: the label that each row of the weight stands for, ascending.
    """

    weight: Tensor
    bias: Tensor
    classes: Tensor

    def rank(self, features: Tensor) -> Tensor:
        """The labels of the five best classes of each row (or of all, if they are fewer), the best first."""
        rows = F.normalize(check_features(features, "the images"), dim=1)
        scores = F.linear(rows, self.weight.to(rows.device), self.bias.to(rows.device))
        return self.classes.to(rows.device)[scores.topk(min(TOP, len(self.classes)), dim=1).indices]


def linear_probe_fit(
    features: Tensor, labels: Labels, *, penalty: float = PENALTY, on_progress: OnProgress | None = None
) -> LinearProbe:
    """Multinomial logistic regression on L2-normalised features: mean loss + lambda / 2 |W|^2, lambda = penalty / n.

    The bias is free of penalty. The problem is convex and solved to its optimum, so there is nothing random in it.
    """
    # Unit length: the penalty then weighs the same whatever the scale of a backbone's outputs.
    rows = F.normalize(check_features(features, "the images"), dim=1)
    numbers = as_labels(labels, features, "the images").to(rows.device)
    classes: Tensor
    classes, targets = numbers.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    if len(classes) < 2:
        raise LabelsError("a linear probe needs labels of two or more classes", found=f"only class {int(numbers[0])}")
    weight, bias, converged = solve(rows, targets, len(classes), penalty / len(rows), on_progress)
    if not converged:
        warnings.warn("the linear probe did not converge: its accuracy may be too low", stacklevel=2)
    return LinearProbe(weight, bias, classes)


def choose_penalty(features: Tensor, labels: Labels, *, seed: int = 0, on_progress: OnProgress | None = None) -> float:
    """The penalty that does best on a fifth of every class, held back from the fit; the recipe's where all do alike.

    A class of one image cannot be divided, and is only learned. If every class is so, there is nothing to choose by.
    """
    y = as_labels(labels, features, "the images").cpu()
    chosen = label_split(y.tolist(), 1 - _HELD_BACK, seed)
    held_back = np.setdiff1d(np.arange(len(y)), chosen)
    if not len(held_back):
        return PENALTY
    accuracies = {}
    for number, penalty in enumerate(PENALTIES):
        probe = linear_probe_fit(features[chosen], y[chosen], penalty=penalty)
        accuracies[penalty] = float((probe.rank(features[held_back])[:, 0].cpu() == y[held_back]).double().mean())
        if on_progress is not None:
            on_progress((number + 1) / len(PENALTIES))
    return max(PENALTIES, key=lambda penalty: (accuracies[penalty], -abs(math.log(penalty / PENALTY))))


def linear_probe(train: Tensor, labels: Labels, test: Tensor, test_labels: Labels) -> float:
    """Test accuracy (top-1) of the probe that fits the training features."""
    truth = as_labels(test_labels, test, "the test images").to(test.device)
    first = linear_probe_fit(train, labels).rank(test)[:, 0]
    return float((first == truth).double().mean())


def few_label_probe(
    train: Tensor, labels: Labels, test: Tensor, test_labels: Labels, *, fraction: float = 0.01, seeds: int = 5
) -> tuple[float, list[float]]:
    """`linear_probe` with a share of every class's training labels: the mean over seeds, and the accuracy for each."""
    y = as_labels(labels, train, "the images").cpu()
    if seeds < 1:
        raise LabelsError("there are no labels to learn from", expected="at least one seed", found=seeds)
    splits = [label_split(y.tolist(), fraction, seed) for seed in range(seeds)]
    each = [linear_probe(train[chosen], y[chosen], test, test_labels) for chosen in splits]
    return float(np.mean(each)), each
