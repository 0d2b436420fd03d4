"""The figure of few labels: what is learned without labels helps where labels are fewest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .drawing import curves
from .readings import accuracy, low_shot
from .scale import Case, Scale
from .study import Claim, Entry, Study, register
from .tasks import Adapt, Task, Train

SHARES = {
    "cifar100": (0.0025, 0.005, 0.01, 0.02, 0.04, 0.1),
    "cifar10": (0.0025, 0.005, 0.01, 0.02, 0.04, 0.1),
    "sun397": (0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1),
}
_FEWEST = 0.01  # of the labels in miniature: 20 of 2,000 images
_LAPTOP_SHARES = (_FEWEST, 0.04, 0.1)
_METHODS = {"full fine-tuning": "full", "mask": "mask"}


@register
class LowShot(Study):
    name = "low-shot"
    title = "Few labels: masks learned without them against all that needs them (the low-shot figure)"
    claims = (
        Claim(
            "with few labels, SMN and a probe beat a probe of the frozen backbone",
            ("linear", "top1"),
            "SMN + linear probe",
            "linear probe",
            x=_FEWEST,
        ),
        *(
            Claim(
                f"with few labels, SMN and a probe beat {what}", ("linear", "top1"), "SMN + linear probe", by, x=_FEWEST
            )
            for by, what in (("full fine-tuning", "full fine-tuning"), ("mask", "masks learned from the labels"))
        ),
    )

    def entries(self, scale: Scale) -> list[Entry]:
        return [
            entry
            for case in scale.cases(tuple(SHARES))
            for seed in scale.repetitions()
            for entry in self._of(scale, case, seed)
        ]

    def _of(self, scale: Scale, case: Case, seed: int) -> list[Entry]:
        shares = _LAPTOP_SHARES if scale.in_miniature else SHARES[case.data]
        seeds = scale.repetitions()
        found = low_shot(case, "linear probe", None, shares, seeds, seed)
        found += low_shot(case, "SMN + linear probe", Adapt(case.subject, scale.adapt(seed=seed)), shares, seeds, seed)
        for setting, method in _METHODS.items():
            for share in shares:
                config = scale.train(method=method, seed=seed, label_fraction=share, stratified=False)
                found.append(accuracy(case, setting, Train(case.subject, config), seed, x=share))
        return found

    def draw(self, found: Mapping[Entry, float], folder: Path, place: Callable[[Task], Path]) -> Sequence[str]:
        return curves(
            found, folder / "low-shot.svg", x="share of labels", y="accuracy", measures=("linear", "top1"), log=True
        )
