"""The appendix on invariance: of rate, first score and threshold, only the rate matters; here to the last bit.

Scores that start a times as high and move at a times the rate stay a times as high: the same masks, bit for bit, where
a is a power of two, because floating-point numbers are then rounded alike. A threshold that is moved along with the
scores changes the rounding: sooner or later a score within it of the threshold is on the other side of it, and from
then on the runs drift apart, as any two do that differ in one bit.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import LogKey, RunFile
from ..masking import MaskedModel
from ..training.folder import read_log
from .drawing import curves
from .readings import steps_of
from .scale import Case, Scale
from .study import Claim, Curve, Entry, Result, Study, register
from .tasks import Task, Train, World, leave

DATA = ("cifar10",)
_STANDARD, _FASTER, _HIGHER = "standard", "rate 100", "threshold 0.5"
_EQUIVALENT = "rate 100 and scores 2.5 and threshold 0.5"
_DOUBLE, _HALF = "rate 100 and scores 2.0", "rate 25 and scores 0.5"
SETTINGS: dict[str, dict[str, Any]] = {
    _STANDARD: {},
    _EQUIVALENT: {"lr": 100.0, "mask": {"s0": 2.5, "mu": 0.5}},
    _FASTER: {"lr": 100.0},
    "scores 2.0": {"mask": {"s0": 2.0}},
    _HIGHER: {"mask": {"mu": 0.5}},
    _DOUBLE: {"lr": 100.0, "mask": {"s0": 2.0}},
    _HALF: {"lr": 25.0, "mask": {"s0": 0.5}},
}
"""The paper's, as they differ from the standard (rate 50, scores 1, threshold 0), and two scaled by a power of two."""
PAIRS = (
    (_DOUBLE, _STANDARD),
    (_HALF, _STANDARD),
    (_EQUIVALENT, _STANDARD),
    (_HIGHER, _FASTER),
    (_FASTER, _STANDARD),
)
"""Whose masks are compared: the first two pairs are equal, the next two but for rounding, the last is not."""
EPOCHS = 150
"""Of the paper's runs. Shorter ones go through the same phases faster: places on their curves are counted in these."""
_JUDGED = 100.0  # the epoch that claims are judged by: what is learned is seen, and differences are, too
_LAPTOP_EPOCHS = 10  # of these that a point of a short run is the mean of


@dataclasses.dataclass(frozen=True)
class Beside(Task):
    """The losses of a run, and in how many bits its mask differs from that of another.

    every: so many of the paper's epochs are one point of the curve.
    """

    verb = "compare"
    of: Train
    other: Train
    every: int = 1

    @property
    def needs(self) -> tuple[Task, ...]:
        return self.of, self.other

    @property
    def title(self) -> str:
        runs = f"{_words(self.of)} and {_words(self.other)}"
        return f"compare the masks of {runs} on {self.subject}, seed {self.of.config.seed}"

    def settings(self) -> Mapping[str, Any]:
        return {"every": self.every}

    def run(self, place: Path, world: World) -> None:
        model = world.backbone(self.subject).model
        one, other = (
            MaskedModel.from_pretrained(model, world.place(run) / RunFile.MASK).pack() for run in (self.of, self.other)
        )
        steps = world.result(self.of)["steps"]
        log, other_log = (read_log(world.place(run)) for run in (self.of, self.other))
        apart = one.bits_apart(other)
        found = {"bits_apart": apart, "share_apart": apart / sum(one.sizes.values())}
        leave(
            place, {**found, "epochs_alike": alike(log, other_log, steps), "losses": by_epoch(log, steps, self.every)}
        )


def alike(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], steps: int) -> float:
    """For how many epochs of the paper two runs lost the same, to the last bit."""
    same = itertools.takewhile(lambda pair: pair[0][LogKey.LOSS] == pair[1][LogKey.LOSS], zip(one, other, strict=False))
    return EPOCHS * max((line[LogKey.STEP] for line, _ in same), default=0) / steps


def by_epoch(log: Sequence[Mapping[str, Any]], steps: int, every: int) -> dict[str, float]:
    """The mean loss of each part of a run, by where it ends in epochs of the paper."""
    found: dict[int, list[float]] = {}
    for line in log:
        epoch = every * math.ceil(EPOCHS * line[LogKey.STEP] / steps / every)
        found.setdefault(epoch, []).append(line[LogKey.LOSS])
    return {str(epoch): math.fsum(losses) / len(losses) for epoch, losses in found.items()}


@register
class Invariance(Study):
    name = "invariance"
    title = "Rate, first score and threshold: equal but for scale and shift (appendix: hyperparameter-free masking)"
    claims = (
        Claim(
            "scaled and shifted alike, they give the same loss",
            ("loss",),
            _EQUIVALENT,
            _STANDARD,
            x=_JUDGED,
            equal=True,
        ),
        Claim("half the way to the threshold is twice the rate", ("loss",), _HIGHER, _FASTER, x=_JUDGED, equal=True),
        Claim("scores that start twice as high take longer to learn", ("loss",), "scores 2.0", _STANDARD, x=_JUDGED),
        Claim("twice the rate learns faster", ("loss",), _STANDARD, _FASTER, x=_JUDGED),
    )

    def entries(self, scale: Scale) -> list[Entry]:
        return [
            entry
            for case in scale.cases(DATA)
            for seed in scale.repetitions()
            for entry in _of(scale, case._replace(backbone=""), seed)  # the paper names none
        ]

    def draw(self, found: Mapping[Entry, float], folder: Path, place: Callable[[Task], Path]) -> Sequence[str]:
        return curves(found, folder / "invariance.svg", x="epoch (of 150)", y="loss", measures=("loss",))


def _of(scale: Scale, case: Case, seed: int) -> list[Entry]:
    runs = {setting: Train(case.subject, scale.train(seed=seed, **changes)) for setting, changes in SETTINGS.items()}
    every = _LAPTOP_EPOCHS if scale.in_miniature else 1
    pairs = {**dict.fromkeys(runs, _STANDARD), **dict(PAIRS)}
    tasks = {setting: Beside(case.subject, runs[setting], runs[other], every) for setting, other in pairs.items()}
    steps = steps_of(runs[_STANDARD])
    found = [Entry(case, setting, "loss", task, _losses, seed=seed, steps=steps) for setting, task in tasks.items()]
    for setting, other in PAIRS:
        for measure in ("bits_apart", "share_apart", "epochs_alike"):
            task = tasks[setting]
            found.append(
                Entry(case, f"{setting} against {other}", measure, task, _read(measure), seed=seed, steps=steps)
            )
    return found


def _losses(result: Result) -> Curve:
    return {float(epoch): loss for epoch, loss in result["losses"].items()}


def _read(measure: str) -> Callable[[Result], float]:
    return lambda result: float(result[measure])


def _words(run: Train) -> str:
    mask = run.config.mask
    return f"rate {run.config.lr or 50:g}, scores {mask.s0:g}, threshold {mask.mu:g}"
