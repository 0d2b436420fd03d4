"""Classes and their probabilities for vectors: from a trained head, or from labelled examples."""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import EvaluationError
from .inputs import check_features
from .knn import knn_votes
from .probe import LinearProbe, choose_penalty, linear_probe_fit

By = Literal["probe", "knn"]


class Predictor(Protocol):
    """Maps vectors [n, width] to probabilities [n, classes]."""

    @property
    def classes(self) -> list[str]: ...

    def __call__(self, vectors: Tensor) -> Tensor: ...


class Scores(Protocol):
    """A head: one number a class, of which the softmax is a probability."""

    @property
    def classes(self) -> list[str]: ...

    def __call__(self, vectors: Tensor, /) -> Tensor: ...


class HeadPredictor:
    """By what was trained with the model."""

    def __init__(self, head: Scores) -> None:
        self.head, self.classes = head, head.classes

    def __call__(self, vectors: Tensor) -> Tensor:
        with torch.inference_mode():
            found = self.head(vectors).softmax(1)
        return found.clone()


@dataclasses.dataclass(frozen=True)
class ProbePredictor:
    """By a linear probe of the examples; its classes are some of all classes, by number."""

    probe: LinearProbe
    classes: list[str]

    def __call__(self, vectors: Tensor) -> Tensor:
        rows = F.normalize(check_features(vectors, "the images"), dim=1)
        scores = F.linear(rows, self.probe.weight.to(rows.device), self.probe.bias.to(rows.device))
        found = rows.new_zeros(len(rows), len(self.classes))
        found[:, self.probe.classes.to(rows.device)] = scores.softmax(1)
        return found


@dataclasses.dataclass(frozen=True)
class KnnPredictor:
    """By the votes of the nearest examples: the share of a class in them."""

    bank: Tensor
    labels: Tensor
    classes: list[str]
    k: int = 20
    temperature: float = 0.1

    def __call__(self, vectors: Tensor) -> Tensor:
        parts = []
        k = min(self.k, len(self.bank))
        for numbers, votes in knn_votes(self.bank, self.labels, vectors, k=k, temperature=self.temperature):
            found = votes.new_zeros(len(votes), len(self.classes))
            found[:, numbers] = votes / votes.sum(1, keepdim=True)
            parts.append(found)
        return torch.cat(parts)


def learned_from(vectors: Tensor, labels: Tensor, classes: list[str], *, by: By = "probe", k: int = 20) -> Predictor:
    """What examples teach. A probe's regularisation is chosen on a fifth of them."""
    if by == "knn":
        return KnnPredictor(vectors, labels, classes, k)
    if by != "probe":
        raise EvaluationError("unknown way to predict", expected="probe or knn", found=by)
    return ProbePredictor(linear_probe_fit(vectors, labels, penalty=choose_penalty(vectors, labels)), classes)
