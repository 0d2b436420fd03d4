"""The guard of a run: it knows the best point so far, start included, and what to do when training goes wrong."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import RunMismatchError
from ..masking import MaskedModel
from ..objectives import Health
from .beside import Beside
from .quality import LEAST, MEASURE, Gain, as_quality

GENTLER = 0.25  # of the learning rate, after going back
_PLATEAU = 80  # steps at the loss of a guess that are a plateau; known, with the lines before and after, within 100
_GUESS = 0.99  # of ln K; a loss above is that of a guess
_SPREAD = 0.02  # of unit vectors: 1 - |mean|^2; below, all images look alike to the network
_LOST = 0.85  # of the best quality so far; below, what was learned is being lost

State = dict[str, Any]


class Guard:
    """Measures now and then, keeps the last point that is proven better than what the run falls back to and not proven
    worse than the best one, and answers trouble: go back once, and gentler; then stop.

    The last, and not the one of the highest quality: rates fall to nothing at the end of a run, which settles what was
    learned, while between points that the measure cannot tell apart, the highest is so by luck.

    measure: scores of the model as it is, without labels; higher is better. Their order is always the same.
    gain: how much better the second scores are than the first.
    every, looks: steps between two measurements, and how many there will be.
    baseline: the scores of what the run falls back to, where that is not the point it starts at.
    """

    def __init__(
        self,
        measure: Callable[[], Tensor],
        gain: Callable[[Tensor, Tensor], Gain],
        *,
        every: int,
        looks: int,
        baseline: Callable[[], Tensor] | None = None,
    ) -> None:
        self._measure, self._gain, self.every, self._looks, self._baseline = measure, gain, every, looks, baseline
        self.scale = 1.0
        self.best_step, self.best_quality, self.first_quality = 0, -math.inf, -math.inf
        self.best_gain: Gain | None = None
        self.stopped = False
        self.seconds = 0.0  # spent on measuring
        self._learned = 0  # the last step whose loss was better than a guess
        self._first = torch.zeros(1, 1)  # scores of what the run falls back to
        self._top: Tensor | None = None  # scores of the point of the highest quality among those kept so far
        self._peak = -math.inf  # the best quality of any point of this run, kept or not

    def measure(self, measure: Callable[[], Tensor] | None = None) -> Tensor:
        start = time.perf_counter()
        measured = (measure or self._measure)()
        self.seconds += time.perf_counter() - start
        return measured

    def begin(self, take: Callable[[], State]) -> None:
        """Measure the start, or what takes its place: nothing is kept that is not proven better."""
        self.best_state = copy.deepcopy(take())  # before measuring, which may estimate statistics anew and round them
        scores = self.measure()
        self._peak = as_quality(scores)
        self._first = self.measure(self._baseline) if self._baseline else scores
        self.first_quality = self.best_quality = as_quality(self._first)

    def look(
        self, line: Mapping[str, Any], model: nn.Module, take: Callable[[], State], scores: Tensor | None = None
    ) -> str | None:
        """What is wrong after this line of the log, if anything; else keep the point if none before is better."""
        trouble = self._collapse(line, model)
        if trouble is None and scores is not None:
            quality, gain = as_quality(scores), self._gain(self._first, scores)
            if quality > LEAST and gain.proven(self._looks) and not self._is_worse(scores):
                self.best_step, self.best_quality, self.best_gain = line["step"], quality, gain
                if self._top is None or as_quality(self._top) < quality:
                    self._top = scores
                self.best_state = copy.deepcopy(take())  # after the rest, which is part of it
            elif quality < _LOST * self._peak:
                trouble = f"quality fell from {self._peak:.3f} to {quality:.3f}"
            self._peak = max(self._peak, quality)
        return trouble

    def _is_worse(self, scores: Tensor) -> bool:
        """Whether the best point so far is proven better. It stays the yardstick: many small losses add up.

        It is the highest of several, and partly so by luck: every look of the run is one more that it may beat so.
        """
        return self._top is not None and self._gain(scores, self._top).proven(self._looks)

    def _collapse(self, line: Mapping[str, Any], model: nn.Module) -> str | None:
        if not math.isfinite(line["loss"]):
            return "the loss is not finite"
        health = Health.of_line(line)
        if health.spread is not None and health.spread < _SPREAD:
            return "the features of all images have collapsed to nearly the same vector"
        if isinstance(model, MaskedModel):
            for name, mask in model.masks():
                if not bool(mask.any()):
                    return f"all weights of {name} are off"
        if health.guess is None or line["loss"] <= _GUESS * health.guess:
            self._learned = line["step"]
        elif line["step"] - self._learned >= _PLATEAU:
            return f"the loss stays at ln K = {health.guess:.2f}, the chance level"
        return None

    def answer(self, step: int) -> str:
        """What to do about trouble: go back to the best point, and on with a gentler rate; the second time, stop."""
        self._learned = step
        self.stopped, self.scale = self.scale != 1.0, GENTLER
        if self.stopped:
            return f"stopped; step {self.best_step} is kept"
        return f"returned to step {self.best_step}, continuing with a quarter of the learning rate"

    def state_dict(self) -> dict[str, Any]:
        """All but the best point itself, which has a file of its own."""
        return {
            "measure": MEASURE,
            "scale": self.scale,
            "best_step": self.best_step,
            "best_quality": self.best_quality,
            "best_gain": None if self.best_gain is None else dataclasses.astuple(self.best_gain),
            "first": self._first,
            "top": self._top,
            "peak": self._peak,
            "stopped": self.stopped,
            "learned": self._learned,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any], best: State) -> None:
        if state.get("measure") != MEASURE:
            raise RunMismatchError(
                "the run was begun by another release, which measured quality in another way",
                todo="finish it with that release, or begin anew in another folder: --out",
            )
        self.scale, self.best_step, self.best_quality = state["scale"], state["best_step"], state["best_quality"]
        self.best_gain = None if state["best_gain"] is None else Gain(*state["best_gain"])
        self._first, self._top, self.stopped = state["first"], state["top"], state["stopped"]
        self.first_quality = as_quality(self._first)
        self.seconds, self._learned, self._peak = state["seconds"], state["learned"], state["peak"]
        self.best_state = best


def take_state(model: nn.Module, objective: nn.Module, optimizer: Optimizer) -> State:
    """Everything that changes from step to step, as it is now: copy it to keep it. A frozen base never changes."""
    frozen = "base." if isinstance(model, Beside) else None
    return {
        "model": {key: v for key, v in model.state_dict().items() if frozen is None or not key.startswith(frozen)},
        "objective": objective.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": getattr(model, "progress", None),
    }


def put_state(state: State, model: nn.Module, objective: nn.Module, optimizer: Optimizer) -> None:
    # The base's own weights are not in the state, but the objects keep theirs.
    model.load_state_dict(model.state_dict() | state["model"])
    objective.load_state_dict(state["objective"])
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    if isinstance(model, MaskedModel):
        model.progress = state["progress"]
