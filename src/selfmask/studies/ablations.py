"""The appendix on ablations: the number of prototypes, what stays frozen, and where the weights come from."""

from __future__ import annotations

import dataclasses
from typing import Any

from .readings import measured
from .scale import DINO, RESNET50, SWAV, Scale
from .study import Claim, Entry, Study, register
from .tasks import Adapt

DATA = ("cifar10", "dtd", "sun397")
_SETTINGS: dict[str, dict[str, Any]] = {
    "50 prototypes": {"objective": {"prototypes": 50}},
    "500 prototypes": {},
    "5000 prototypes": {"objective": {"prototypes": 5000}},
    "nothing frozen": {"mask": {"select": "all"}},
    "batch norms frozen": {},
    "biases frozen": {"mask": {"select": "all", "exclude": ("*bias",)}},
}
_STARTS = {"SwAV weights": SWAV, "DINO weights": DINO, "supervised weights": RESNET50}
# In miniature, how `selfmask pretrain` makes what stands for them, of the same images.
_PRETRAINED: dict[str, dict[str, Any]] = {SWAV: {}, DINO: {"objective": "dino"}, RESNET50: {"labels": True}}


@register
class Ablations(Study):
    name = "ablations"
    title = "What matters: prototypes, what stays frozen, the start (appendix: ablations)"
    claims = (
        Claim("50 prototypes are too few", ("knn",), "500 prototypes", "50 prototypes"),
        Claim("norm layers must not be masked", ("knn",), "batch norms frozen", "nothing frozen"),
        Claim(
            "norm layers must not be masked, whether or not biases are left alone",
            ("knn",),
            "batch norms frozen",
            "biases frozen",
        ),
    )

    def entries(self, scale: Scale) -> list[Entry]:
        found = []
        for case in scale.cases(DATA):
            for seed in scale.repetitions():
                for setting, changes in _SETTINGS.items():
                    run = Adapt(case.subject, scale.adapt(seed=seed, **changes))
                    found += measured(case, setting, run, seed)
        for setting, backbone in _STARTS.items():
            for case in scale.cases(DATA, (backbone,)):
                start = scale.pretrain(**_PRETRAINED[backbone])
                subject = dataclasses.replace(case.subject, start=start)
                for seed in scale.repetitions():
                    found += measured(
                        case._replace(subject=subject), setting, Adapt(subject, scale.adapt(seed=seed)), seed
                    )
        return found
