"""The guard of a run: it knows the best point so far, start included, and what to do when training goes wrong."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..masking import MaskedModel

GENTLER = 0.25  # of the learning rate, after going back
_PLATEAU = 80  # steps at the loss of a guess that are a plateau; known, with the lines before and after, within 100
_GUESS = 0.99  # of ln K; a loss above is that of a guess
_SPREAD = 0.02  # of unit vectors: 1 - |mean|^2; below, all images look alike to the network
_LOST = 0.85  # of the best quality so far; below, what was learned is being lost

State = dict[str, Any]


class Guard:
    """Measures quality now and then, keeps the best point, and answers trouble: go back once, and gentler; then stop.

    quality: measures the model as it is, without labels; higher is better.
    every: steps between two measurements.
    """

    def __init__(self, quality: Callable[[], float], every: int) -> None:
        self.quality, self.every = quality, every
        self.scale = 1.0
        self.best_step, self.best_quality, self.first_quality = 0, -math.inf, -math.inf
        self.stopped = False
        self.seconds = 0.0  # spent on measuring
        self._learned = 0  # the last step whose loss was better than a guess

    def measure(self) -> float:
        start = time.perf_counter()
        quality = self.quality()
        self.seconds += time.perf_counter() - start
        return quality

    def begin(self, take: Callable[[], State]) -> None:
        """Measure the start: what comes out is never worse than that."""
        self.best_state = copy.deepcopy(take())  # before measuring, which may estimate statistics anew and round them
        self.first_quality = self.best_quality = self.measure()

    def look(self, line: Mapping[str, Any], model: nn.Module, take: Callable[[], State]) -> str | None:
        """What is wrong after this line of the log, if anything is; else keep the point if it is the best so far."""
        trouble = self._collapse(line, model)
        quality = line.get("quality")
        if trouble is None and quality is not None:
            if quality > self.best_quality:
                self.best_step, self.best_quality = line["step"], quality
                self.best_state = copy.deepcopy(take())
            elif quality < _LOST * self.best_quality:
                trouble = f"quality fell from {self.best_quality:.3f} to {quality:.3f}"
        return trouble

    def _collapse(self, line: Mapping[str, Any], model: nn.Module) -> str | None:
        if not math.isfinite(line["loss"]):
            return "the loss is not a number any more"
        if line.get("spread", 1.0) < _SPREAD:
            return "the features of all images have become alike"
        if isinstance(model, MaskedModel):
            for name, mask in model.masks():
                if not bool(mask.any()):
                    return f"all weights of {name} are off"
        if line["loss"] <= _GUESS * line.get("ln_k", math.inf):
            self._learned = line["step"]
        elif line["step"] - self._learned >= _PLATEAU:
            return f"the loss stays at ln K = {line['ln_k']:.2f}, that of a guess"
        return None

    def answer(self, step: int) -> str:
        """What to do about trouble: go back to the best point, and on with a gentler rate; the second time, stop."""
        self._learned = step
        self.stopped, self.scale = self.scale != 1.0, GENTLER
        if self.stopped:
            return f"stopped for good; step {self.best_step} is kept"
        return f"went back to step {self.best_step}, and on with a quarter of the learning rate"

    def state_dict(self) -> dict[str, Any]:
        """All but the best point itself, which has a file of its own."""
        return {
            **{"scale": self.scale, "best_step": self.best_step, "best_quality": self.best_quality},
            **{"first_quality": self.first_quality, "stopped": self.stopped, "learned": self._learned},
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any], best: State) -> None:
        self.scale, self.best_step, self.best_quality = state["scale"], state["best_step"], state["best_quality"]
        self.first_quality, self.stopped = state["first_quality"], state["stopped"]
        self.seconds, self._learned = state["seconds"], state["learned"]
        self.best_state = best


def take_state(model: nn.Module, objective: nn.Module, optimizer: Optimizer) -> State:
    """Everything that changes from step to step, as it is now: copy it to keep it. The base of a mask never changes."""
    frozen = "base." if isinstance(model, MaskedModel) else None
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
