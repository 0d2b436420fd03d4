"""Table 3: a mask for all images against one for all and an expert for each cluster."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..commands.cascade.config import CascadeConfig
from .readings import measured
from .scale import Case, Scale
from .study import Claim, Entry, Study, register
from .tasks import Adapt, Cascade

DATA = ("cifar100", "inatloc500")
_EPOCHS = {"inatloc500": 54.0}  # of the dispatcher: about as many steps as 150 epochs of 50,000 images
_EXPERT_IMAGES = 7_500_000
SHAPE: dict[str, Any] = {"experts": 5, "router": "gmm", "components": 20}


@register
class Cascades(Study):
    name = "cascade"
    title = "Cascades: one mask, and an expert for each cluster (Table 3)"
    claims = (
        Claim("the conditional cascade beats one mask by k-NN", ("knn",), "conditional cascade", "SMN"),
        Claim("the unconditional cascade beats one mask by k-NN", ("knn",), "unconditional cascade", "SMN"),
        Claim("the unconditional cascade beats one mask by linear probes", ("linear",), "unconditional cascade", "SMN"),
        Claim(
            "the unconditional cascade beats the conditional one by k-NN",
            ("knn",),
            "unconditional cascade",
            "conditional cascade",
        ),
    )

    def entries(self, scale: Scale) -> list[Entry]:
        return [
            entry for case in scale.cases(DATA) for seed in scale.repetitions() for entry in self._of(scale, case, seed)
        ]

    def _of(self, scale: Scale, case: Case, seed: int) -> list[Entry]:
        whole = cascade_of(scale, case, seed)
        # A cascade whitens its vectors, which alone does much for k-NN: so one mask is whitened, too, and none.
        return [
            *measured(case, "frozen, whitened", None, seed, whiten=1.0),
            *measured(case, "SMN", whole.dispatcher, seed),
            *measured(case, "SMN, whitened", whole.dispatcher, seed, whiten=1.0),
            *measured(case, "conditional cascade", whole, seed, variant="conditional"),
            *measured(case, "unconditional cascade", whole, seed, variant="unconditional"),
        ]


def cascade_of(scale: Scale, case: Case, seed: int) -> Cascade:
    """Five experts, each from the dispatcher's scores and heads, as the paper's code had them."""
    config = scale.adapt(seed=seed)
    if case.data in _EPOCHS and not scale.in_miniature:
        config = dataclasses.replace(config, epochs=_EPOCHS[case.data])  # all else stays, in steps and in shares
    shape = SHAPE if scale.in_miniature else {**SHAPE, "expert_images": _EXPERT_IMAGES}
    return Cascade(case.subject, Adapt(case.subject, config), CascadeConfig(**shape, adapt=config))
