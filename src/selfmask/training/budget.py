"""How much fits into a time: some steps are taken and timed before the run, and forgotten."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .batches import Steps
from .beside import Beside
from .config import Precision
from .precision import autocast

LEAST_STEPS = 40  # fewer teach nothing
_TRIED, _SLOWER = 8, 4  # steps; the first are slower, until memory and threads are warm, and not counted
_OVERHEAD = 1.08  # of a step: heads, optimizer, the gate's looks, checkpoints
_PASSES = 4  # forward passes over all images besides steps: a teacher with its mirror, the map, the report
_REFRESHED = 240  # steps after which a teacher may make two more


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a step costs here.

    step: seconds of a step.
    image: seconds of a forward pass, per image.
    """

    step: float
    image: float

    @staticmethod
    def measure(model: nn.Module, batches: Steps, device: torch.device, precision: Precision = "float32") -> Speed:
        """Take some steps without an optimizer; afterwards everything is as it was."""
        frozen = "base." if isinstance(model, Beside) else None
        before = {key: v.clone() for key, v in model.state_dict().items() if not (frozen and key.startswith(frozen))}
        was_training, seconds = model.training, []
        model.train()
        for number in range(_TRIED):
            start = time.perf_counter()
            batch = tree_map(lambda tensor: tensor.to(device), batches[number])
            views = batch[0] if isinstance(batch, tuple) else batch
            with autocast(precision, device):
                vectors = [model(view) for view in views]
            torch.stack([each.float().square().mean() for each in vectors]).sum().backward()  # type: ignore[no-untyped-call]
            _settled(device)
            seconds.append(time.perf_counter() - start)
        with torch.no_grad():
            start = time.perf_counter()
            model(views[0])
            _settled(device)
            image = (time.perf_counter() - start) / len(views[0])
        for parameter in model.parameters():
            parameter.grad = None
        model.load_state_dict(model.state_dict() | before)
        model.train(was_training)
        return Speed(statistics.median(seconds[_SLOWER:]), image)

    def steps_within(self, seconds: float, images: int) -> int:
        """How many steps fit, for a run with so many images."""
        once = images * self.image
        return max(LEAST_STEPS, int((seconds - _PASSES * once) / self._each(once)))

    def _each(self, once: float) -> float:
        """Seconds of a step with its share of what is done now and then. `once`: a pass over all images."""
        return _OVERHEAD * self.step + 2 * once / _REFRESHED

    def plan(self, steps: int, images: int, state: Any) -> dict[str, Any]:
        """What a run takes: steps, seconds, bytes of memory and of disk. `state`: what a checkpoint holds of it."""
        held = sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
        return {
            "steps": steps,
            "seconds": self._each(images * self.image) * steps + _PASSES * images * self.image,
            "seconds_per_step": self._each(images * self.image),
            "memory_bytes": psutil.Process().memory_info().rss,
            "disk_bytes": 2 * held,  # the last checkpoint and the best
        }


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
