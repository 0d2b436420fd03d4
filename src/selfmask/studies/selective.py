"""The appendix on selective masking: the first stages alone, and random or large weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .drawing import curves
from .readings import measured
from .scale import Case, Scale
from .study import Claim, Entry, Study, register
from .tasks import Adapt, Task

DATA = ("cifar10", "cifar100")
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_LAPTOP_SHARES = (0.05, 0.5, 1.0)
_LAPTOP_STAGES = ("stages:1-1", "stages:1-2")  # of a small network, which has three; how many weights that is, it knows
_STAGES = {213_504: "stages:1-1", 1_426_944: "stages:1-2", 8_506_880: "stages:1-3", 23_453_184: "stages:1-4"}
_ALL = 23_462_592
_AS_MANY = (213_504, 1_426_944, 8_506_880)


@register
class Selective(Study):
    name = "selective"
    title = "Masks of some weights only: the first stages, random ones, the largest (appendix: selective masking)"
    claims = (
        Claim("of half of the weights, any will do", ("knn",), "random", "magnitude", x=0.5, equal=True),
        Claim("with few weights, the largest are better than random ones", ("knn",), "magnitude", "random", x=0.05),
    )

    def entries(self, scale: Scale) -> list[Entry]:
        return [
            entry for case in scale.cases(DATA) for seed in scale.repetitions() for entry in self._of(scale, case, seed)
        ]

    def _of(self, scale: Scale, case: Case, seed: int) -> list[Entry]:
        def run(setting: str, **mask: Any) -> list[Entry]:
            return measured(case, setting, Adapt(case.subject, scale.adapt(seed=seed, mask=mask)), seed)

        def runs(setting: str, count: float, **mask: Any) -> list[Entry]:
            return [dataclasses.replace(entry, x=count / _ALL, paper_x=count) for entry in run(setting, **mask)]

        found = []
        for share in _LAPTOP_SHARES if scale.in_miniature else _SHARES:
            for by in ("random", "magnitude"):
                some = {} if share == 1 else {"seed": seed, "fraction": share, "fraction_by": by}
                found += runs(by, share * _ALL, **some)
        if scale.in_miniature:
            for stages in _LAPTOP_STAGES:
                found += run(stages.replace(":", " "), select=stages)
            return found
        for count, stages in _STAGES.items():
            found += runs("first stages", count, select=stages)
        for count in _AS_MANY:
            found += runs("random as many as the first stages", count, seed=seed, fraction=count / _ALL)
        return found

    def draw(self, found: Mapping[Entry, float], folder: Path, place: Callable[[Task], Path]) -> Sequence[str]:
        return curves(
            found, folder / "selective.svg", x="share of weights with a score", y="k-NN (k = 200)", measures=("knn",)
        )
