"""The ways to measure features: each ranks classes for test images by what labelled training images tell.

A new one is a function like these and a line in `PROTOCOLS`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..errors import EvaluationError, HeadError, LabelsError
from .inputs import OnProgress
from .knn import knn_rank
from .probe import PENALTY, choose_penalty, linear_probe_fit

_SHOWN = 5  # class names in a message


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

    label_fraction, stratified, seeds: which training labels are used; every seed chooses others.
    k, temperature: of k-NN, which is measured with each k; the first leads.
    sweep: choose the linear probe's penalty by labels held back from training.
    """

    label_fraction: float = 1.0
    stratified: bool = True
    seeds: int = 5
    k: tuple[int, ...] = (20, 200)
    temperature: float = 0.1
    sweep: bool = False

    def __post_init__(self) -> None:
        """What cannot work is refused before images are looked at."""
        if not 0 < self.label_fraction <= 1:
            raise LabelsError(
                "the share of labels is out of range", expected="a share above 0, at most 1", found=self.label_fraction
            )
        if self.seeds < 1 or min(self.k, default=0) < 1 or not 0 < self.temperature < math.inf:
            raise EvaluationError(
                "these evaluation settings are out of range",
                expected="at least one seed and one neighbour, and a temperature above 0 (0.1 in the paper)",
                found=f"seeds {self.seeds}, k {', '.join(map(str, self.k))}, temperature {self.temperature}",
            )


class Classifier(Protocol):
    """What was trained to tell classes by vectors."""

    classes: list[str]

    def ranked(self, vectors: Tensor, count: int = 5) -> Tensor:
        """The numbers of the likeliest classes of each vector, likeliest first."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Labelled features of one model to learn from, and features of test images."""

    train: Tensor
    labels: Tensor
    test: Tensor
    settings: Settings
    seed: int
    classes: Sequence[str] = ()
    head: Classifier | None = None


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Class numbers for each test image, the best first (see `metrics.score`); and what was chosen on the way."""

    ranked: Tensor
    chosen: dict[str, float] = dataclasses.field(default_factory=dict)


Measuring = Callable[[Task, OnProgress], Prediction]


def knn(task: Task, on_progress: OnProgress) -> Prediction:
    k = min(task.settings.k[0], len(task.train))
    ranked = knn_rank(
        task.train, task.labels, task.test, k=k, temperature=task.settings.temperature, on_progress=on_progress
    )
    return Prediction(ranked, {"k": k})


def linear(task: Task, on_progress: OnProgress) -> Prediction:
    penalty = PENALTY
    if task.settings.sweep:
        penalty = choose_penalty(
            task.train, task.labels, seed=task.seed, on_progress=lambda share: on_progress(0.8 * share)
        )
    probe = linear_probe_fit(
        task.train, task.labels, penalty=penalty, on_progress=None if task.settings.sweep else on_progress
    )
    return Prediction(probe.rank(task.test), {"lambda": penalty / len(task.train)})


def trained_head(task: Task, on_progress: OnProgress) -> Prediction:
    """What was trained with the mask; no label is used. Classes are matched by name."""
    head = check_head(task.head, task.classes)
    own = torch.tensor([list(task.classes).index(name) for name in head.classes], device=task.test.device)
    return Prediction(own[head.ranked(task.test)])


def check_head(head: Classifier | None, classes: Sequence[str]) -> Classifier:
    """The head, if there is one and it was made for just these classes."""
    if head is None:
        raise HeadError(
            "there is no head to evaluate",
            expected="a mask or backbone trained with labels",
            todo="train one with `selfmask train`, or use --protocol knn,linear",
        )
    unknown, more = sorted(set(classes) - set(head.classes)), sorted(set(head.classes) - set(classes))
    if unknown or more:
        raise HeadError(
            "the head was trained on other classes than those of these images",
            expected=", ".join(head.classes[:_SHOWN]) + (" ..." if len(head.classes) > _SHOWN else ""),
            found=f"{len(unknown)} classes unknown to the head ({', '.join(unknown[:_SHOWN]) or 'none'}), "
            f"{len(more)} that these images lack ({', '.join(more[:_SHOWN]) or 'none'})",
            todo="give images of the same classes with the same names, or use --protocol knn,linear",
        )
    return head


KNN, HEAD = "knn", "head"
PROTOCOLS: dict[str, Measuring] = {KNN: knn, "linear": linear, HEAD: trained_head}
_TITLES = {"linear": "linear probe", HEAD: "its own head"}


def measures(protocols: Sequence[str], settings: Settings) -> dict[str, tuple[str, Settings]]:
    """What is measured, by the key of its results: the protocol, and its settings.

    k-NN with the first k is "knn"; with another it is "knn_200", say.
    """
    found: dict[str, tuple[str, Settings]] = {}
    for protocol in protocols:
        found[protocol] = protocol, settings
        for k in settings.k[1:] if protocol == KNN else ():
            found[f"{KNN}_{k}"] = KNN, dataclasses.replace(settings, k=(k,))
    return found


def title_of(key: str, settings: Settings) -> str:
    """What to call the results of a key."""
    if key.startswith(KNN):
        return f"k-NN (k = {settings.k[0] if key == KNN else key.removeprefix(f'{KNN}_')})"
    return _TITLES.get(key, key)


def protocols_of(text: str) -> list[str]:
    """The protocols in a list of names parted by commas."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or (unknown := [name for name in names if name not in PROTOCOLS]):
        raise EvaluationError(
            "unknown protocol" if names else "no protocol",
            expected=f"one or more of {', '.join(PROTOCOLS)}, separated by commas",
            found=", ".join(unknown) if names else repr(text),
        )
    return names
