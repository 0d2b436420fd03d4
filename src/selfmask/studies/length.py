"""Not in the paper: how much of what is seen in short runs is due to their length, and to their rate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..commands.adapt_config import AdaptConfig
from .drawing import curves
from .readings import active, measured
from .scale import Case, Scale
from .study import Entry, Study, register
from .tasks import Adapt, Task

DATA = ("cifar10",)
_TIMES = {True: (0.5, 1.0, 2.0, 4.0, 16.0), False: (0.25, 0.5, 1.0)}  # as long as others, by whether in miniature
_SLOW = (1.0, 4.0, 16.0)  # the same for runs in miniature that have the paper's own rate
_EPOCHS, _PAPER_RATE = 150.0, 50.0


@register
class Length(Study):
    name = "length"
    title = "Shorter and longer runs, and slower ones (not in the paper: why a short run may not show what it says)"

    def entries(self, scale: Scale) -> list[Entry]:
        return [
            entry for case in scale.cases(DATA) for seed in scale.repetitions() for entry in self._of(scale, case, seed)
        ]

    def _of(self, scale: Scale, case: Case, seed: int) -> list[Entry]:
        found = measured(case, "frozen", None, seed)
        runs = {("SMN", times): as_long(scale, seed, times) for times in _TIMES[scale.in_miniature]}
        for times in _SLOW if scale.in_miniature else ():
            slow = as_long(scale, seed, times).changed(lr=_PAPER_RATE)
            runs["SMN at the paper's rate", times] = slow
        for (setting, times), config in runs.items():
            run = Adapt(case.subject, config)
            entries = [*measured(case, setting, run, seed), active(case, setting, run, seed)]
            found += [dataclasses.replace(entry, x=times) for entry in entries]
        return found

    def draw(self, found: Mapping[Entry, float], folder: Path, place: Callable[[Task], Path]) -> Sequence[str]:
        x, y = "length (1: as in the other studies)", "k-NN (k = 200)"
        return curves(found, folder / "length.svg", x=x, y=y, measures=("knn",), log=True)


def as_long(scale: Scale, seed: int, times: float) -> AdaptConfig:
    """A run that is so many times as long as others; in miniature, scores get as far, by the root of the steps."""
    config = scale.adapt(seed=seed)
    if times == 1:
        return config
    if config.steps is None:
        return config.changed(epochs=times * _EPOCHS)
    return config.changed(steps=round(times * config.steps), lr=config.lr / math.sqrt(times))
