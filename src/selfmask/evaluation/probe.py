"""Linear probes: how well a linear classifier on frozen features does, with all labels or with few."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from ..errors import EvaluationError
from .knn import as_labels, check_features

# The recipe's lambda is 0.01 / n on the mean loss: mean(loss) + lambda / 2 |W|^2. scikit-learn minimises
# C sum(loss) + 1/2 |W|^2, which is the same with C = 1 / (n lambda) = 100, whatever n.
_C = 100.0
_ITERATIONS = 2000

Labels = Tensor | Sequence[int]


def linear_probe(train: Tensor, labels: Labels, test: Tensor, test_labels: Labels) -> float:
    """Test accuracy (top-1) of multinomial logistic regression on the L2-normalised training features.

    The problem is convex and solved to its optimum, so there is nothing random in it.
    """
    return _accuracy(*_prepared(train, labels), *_prepared(test, test_labels))


def few_label_probe(
    train: Tensor, labels: Labels, test: Tensor, test_labels: Labels, *, fraction: float = 0.01, seeds: int = 5
) -> tuple[float, list[float]]:
    """`linear_probe` with a share of the training labels: the mean over seeds, and the accuracy for each.

    The choice is stratified: that share of every class, and at least one image of each.
    """
    if not 0 < fraction <= 1 or seeds < 1:
        raise EvaluationError("no labels to learn from", expected="a share above 0, a seed", found=(fraction, seeds))
    (x, y), held_out = _prepared(train, labels), _prepared(test, test_labels)
    scores = []
    for seed in range(seeds):
        chosen = stratified(y, fraction, seed)
        scores.append(_accuracy(x[chosen], y[chosen], *held_out))
    return float(np.mean(scores)), scores


def stratified(labels: NDArray[np.int64], fraction: float, seed: int) -> NDArray[np.int64]:
    """The numbers of a random `fraction` of each class (at least one image of each), in ascending order."""
    random = np.random.default_rng(seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    chosen = [random.permutation(own)[: max(1, round(fraction * len(own)))] for own in members]
    return np.sort(np.concatenate(chosen))


def _prepared(features: Tensor, labels: Labels) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    # Unit length: the penalty then weighs the same whatever the scale of a backbone's outputs.
    rows = F.normalize(check_features(features, "the images"), dim=1)
    return rows.cpu().numpy(), as_labels(labels, features, "the images").cpu().numpy()


def _accuracy(
    x: NDArray[np.float32], y: NDArray[np.int64], test_x: NDArray[np.float32], test_y: NDArray[np.int64]
) -> float:
    if len(np.unique(y)) < 2:
        raise EvaluationError("a probe needs labels of two classes or more", found=f"only class {y[0]}")
    # The intercept is free of penalty, so centring leaves the optimum where it is, and reaches it sooner.
    mean = x.mean(0)
    model = LogisticRegression(C=_C, max_iter=_ITERATIONS, tol=1e-4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit(x - mean, y)
    if any(issubclass(warning.category, ConvergenceWarning) for warning in caught):
        warnings.warn("the linear probe did not converge: its accuracy may be too low", stacklevel=3)
    return float(model.score(test_x - mean, test_y))
