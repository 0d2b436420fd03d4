"""Table 2: the threshold against top-k, with half of the weights and with the share that the threshold finds."""

from __future__ import annotations

from typing import Any

from .readings import active, measured
from .scale import Case, Scale
from .study import Claim, Entry, Study, register
from .tasks import Adapt

DATA = ("cifar10", "cifar100", "dtd", "eurosat", "flowers102", "sun397", "ucf101")


@register
class Rules(Study):
    name = "rules"
    title = "How scores become masks: the threshold against top-k (Table 2)"
    claims = (
        Claim("masks learned without labels beat the frozen backbone by k-NN", ("knn",), "SMN", "frozen"),
        Claim("masks learned without labels beat the frozen backbone by linear probes", ("linear",), "SMN", "frozen"),
        Claim("the threshold beats top-k with 50 % of the weights by k-NN", ("knn",), "SMN", "topk 50%"),
        Claim("the threshold beats top-k with 50 % of the weights by linear probes", ("linear",), "SMN", "topk 50%"),
        Claim("the threshold beats top-k with the share that it finds, if not by much", ("knn",), "SMN", "topk found"),
    )

    def entries(self, scale: Scale) -> list[Entry]:
        return [
            entry
            for case in scale.cases(DATA)
            for seed in scale.repetitions()
            for entry in (
                *measured(case, "frozen", None, seed),
                *(
                    each
                    for setting, run in runs(scale, case, seed).items()
                    for each in measured(case, setting, run, seed)
                ),
                active(case, "SMN", runs(scale, case, seed)["SMN"], seed),
            )
        ]


def runs(scale: Scale, case: Case, seed: int) -> dict[str, Adapt]:
    """The runs of one repetition, by setting."""

    def adapt(share_of: Adapt | None = None, **mask: Any) -> Adapt:
        return Adapt(case.subject, scale.adapt(seed=seed, mask=mask), share_of)

    found = adapt()
    return {
        "SMN": found,
        "topk 50%": adapt(rule="topk", score_init="kaiming", active_share=0.5),
        "topk found": adapt(found, rule="topk", score_init="kaiming"),
    }
