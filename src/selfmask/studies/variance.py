"""The appendix on error bars: the same run five times."""

from __future__ import annotations

import dataclasses

from .readings import measured
from .scale import Scale
from .study import Entry, Study, register
from .tasks import Adapt

DATA = ("dtd", "ucf101")
_RUNS = 5


@register
class Variance(Study):
    name = "variance"
    title = "The same run five times (appendix: error bars)"

    def entries(self, scale: Scale) -> list[Entry]:
        return [
            dataclasses.replace(entry, x=seed + 1.0)
            for case in scale.cases(DATA)
            for seed in range(scale.seeds or _RUNS)
            for entry in measured(case, "SMN", Adapt(case.subject, scale.adapt(seed=seed)), seed)
        ]
