"""Table 1: masks learned from labels against full fine-tuning, and the bits that a task takes."""

from __future__ import annotations

from .readings import accuracy, measured, steps_of
from .scale import CLIP, RESNET18, SWAV, Case, Scale
from .study import Claim, Entry, Study, register
from .tasks import Train

DATA = ("cifar10", "cifar100", "dtd", "eurosat", "flowers102", "oxfordiiitpet", "sun397", "ucf101")
_METHODS = {"full fine-tuning": "full", "mask": "mask"}


@register
class Supervised(Study):
    name = "supervised"
    title = "Masks learned from labels against full fine-tuning (Table 1)"
    claims = (
        Claim(
            "masks learned from labels are far better than k-NN of the frozen backbone",
            ("knn", "top1"),
            "mask",
            "frozen",
        ),
        Claim("full fine-tuning is a little better than masks", ("knn", "top1"), "full fine-tuning", "mask"),
    )

    def entries(self, scale: Scale) -> list[Entry]:
        return [
            entry
            for case in scale.cases(DATA, (SWAV, RESNET18, CLIP))
            for seed in scale.repetitions()
            for entry in self._of(scale, case, seed)
        ]

    def _of(self, scale: Scale, case: Case, seed: int) -> list[Entry]:
        found = [entry for entry in measured(case, "frozen", None, seed) if entry.measure == "knn"]
        for setting, method in _METHODS.items():
            run = Train(case.subject, scale.train(method=method, seed=seed, **_head(case)))
            found += [accuracy(case, setting, run, seed), _size(case, setting, run, seed)]
        return found


def _head(case: Case) -> dict[str, str]:
    return {"head": "clip-text"} if case.subject.backbone == CLIP else {}


def _size(case: Case, setting: str, run: Train, seed: int) -> Entry:
    """As the paper counts, in Mbit: 32 bits a weight in full fine-tuning, one bit in a mask, nothing coded."""
    bits = 32 if run.config.method == "full" else 1
    return Entry(
        case,
        setting,
        "size_mbit",
        run,
        lambda result: bits * result["trained"] / 1e6,
        seed=seed,
        steps=steps_of(run),
    )
