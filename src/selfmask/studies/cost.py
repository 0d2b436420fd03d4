"""The appendix on compute: what a run takes, and what it costs at a price for an hour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .scale import Case, Scale
from .study import Entry, Study, register
from .tasks import Adapt, Train

DATA = ("cifar10",)
DOLLARS_AN_HOUR = 2.0  # of an A100, as the paper counts


@register
class Cost(Study):
    name = "cost"
    title = "What a run takes: time, and the price of it (appendix: compute cost)"

    def entries(self, scale: Scale) -> list[Entry]:
        return [
            entry for case in scale.cases(DATA) for seed in scale.repetitions() for entry in self._of(scale, case, seed)
        ]

    def _of(self, scale: Scale, case: Case, seed: int) -> list[Entry]:
        runs: dict[str, Adapt | Train] = {
            "SMN": Adapt(case.subject, scale.adapt(seed=seed)),
            "full fine-tuning without labels": Adapt(case.subject, scale.adapt(seed=seed, method="full")),
            "mask": Train(case.subject, scale.train(seed=seed)),
            "full fine-tuning": Train(case.subject, scale.train(seed=seed, method="full")),
        }
        found = []
        for setting, run in runs.items():
            steps = run.config.steps or 0
            found.append(Entry(case, setting, "seconds", run, lambda result: result["seconds"], seed=seed, steps=steps))
            found.append(Entry(case, setting, "dollars", run, _dollars, seed=seed, steps=steps))
        return found


def _dollars(result: Mapping[str, Any]) -> float:
    return float(result["seconds"]) / 3600 * DOLLARS_AN_HOUR
