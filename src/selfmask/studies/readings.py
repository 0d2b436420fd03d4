"""How the numbers of a table are read from what runs and measurements leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..evaluation.measuring import MAP
from .scale import Case
from .study import Entry
from .tasks import Adapt, Cascade, Measure, Train

PAPER_KNN = "knn_200"
"""The paper's k-NN, with k = 200, by the name that `evaluate` gives it."""


def measured(
    case: Case,
    setting: str,
    run: Adapt | Cascade | None,
    seed: int,
    variant: str = "mask",
    whiten: float | None = None,
) -> list[Entry]:
    """k-NN, with the paper's k and with 20, and a linear probe, of what a run learned or of the frozen backbone.

    whiten: power of a map that the vectors go through first.
    """
    task = Measure(case.subject, run, whiten=whiten)
    which = ("frozen" if run is None else variant) + ("" if whiten is None else MAP)
    steps = 0 if run is None else steps_of(run)
    names = {"knn": PAPER_KNN, "knn_20": "knn", "linear": "linear"}
    return [Entry(case, setting, name, task, top1(key, which), seed=seed, steps=steps) for name, key in names.items()]


def top1(key: str, variant: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda result: result[key][variant]["top1"]


def active(case: Case, setting: str, run: Adapt | Train, seed: int) -> Entry:
    """The share of active weights that a run found."""
    return Entry(case, setting, "active_share", run, lambda result: result["active"], seed=seed, steps=steps_of(run))


def low_shot(
    case: Case, setting: str, run: Adapt | None, shares: Sequence[float], seeds: Sequence[int], seed: int
) -> list[Entry]:
    """Linear probes with shares of the labels, drawn by the seed from all images alike, as in the paper's code."""
    which = "frozen" if run is None else "mask"
    task = Measure(case.subject, run, tuple(shares), draws=len(seeds), stratified=False)

    def read(share: float) -> Callable[[Mapping[str, Any]], float | None]:
        return lambda result: result[f"linear {share:g}"][which]["each"][seed]

    steps = 0 if run is None else steps_of(run)
    return [Entry(case, setting, "linear", task, read(share), x=share, seed=seed, steps=steps) for share in shares]


def accuracy(case: Case, setting: str, run: Train, seed: int, x: float | None = None) -> Entry:
    """What the head says that was trained."""
    return Entry(case, setting, "top1", run, lambda result: result.get("accuracy"), x=x, seed=seed, steps=steps_of(run))


def steps_of(run: Adapt | Train | Cascade) -> int:
    """How long a run is; 0 where that follows from the number of images."""
    config = run.config.adapt if isinstance(run, Cascade) else run.config
    return config.steps or 0
