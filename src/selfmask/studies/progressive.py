"""The appendix on progressive sparsity: top-k whose share falls from all weights to the share that was found."""

from __future__ import annotations

from .readings import measured
from .rules import runs
from .scale import Scale
from .study import Claim, Entry, Study, register
from .tasks import Adapt

DATA = ("dtd", "eurosat", "flowers102", "ucf101")


@register
class Progressive(Study):
    name = "progressive"
    title = "Top-k whose share falls during training (appendix: progressive sparsity)"
    claims = (Claim("a share that falls makes top-k worse", ("knn",), "topk found", "topk progressive"),)

    def entries(self, scale: Scale) -> list[Entry]:
        found = []
        for case in scale.cases(DATA):
            for seed in scale.repetitions():
                others = runs(scale, case, seed)
                every = "step" if scale.in_miniature else "epoch"  # a short run has no two epochs
                mask = {"rule": "progressive_topk", "score_init": "kaiming", "share_every": every}
                falling = Adapt(case.subject, scale.adapt(seed=seed, mask=mask), others["SMN"])
                named = {"topk progressive": falling, "topk found": others["topk found"], "SMN": others["SMN"]}
                found += [entry for setting, run in named.items() for entry in measured(case, setting, run, seed)]
        return found
