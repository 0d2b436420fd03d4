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

LEAST_STEPS = 40  # fewer teach nothing
_TRIED = 4  # steps; the first is slower, and not counted
_OVERHEAD = 1.08  # of a step: heads, optimizer, the gate's looks, checkpoints
_PASSES = 8  # forward passes over all images besides steps: a teacher, its refreshes, the report


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a step costs here.

    step: seconds of a step.
    image: seconds of a forward pass, per image.
    """

    step: float
    image: float

    @staticmethod
    def measure(model: nn.Module, batches: Steps, device: torch.device) -> Speed:
        """Take some steps without an optimizer; afterwards everything is as it was."""
        frozen = "base." if isinstance(model, Beside) else None
        before = {key: v.clone() for key, v in model.state_dict().items() if not (frozen and key.startswith(frozen))}
        was_training, seconds, images = model.training, [], 1
        model.train()
        for number in range(_TRIED):
            start = time.perf_counter()
            batch = tree_map(lambda tensor: tensor.to(device), batches[number])
            views = batch[0] if isinstance(batch, tuple) else batch
            images = sum(map(len, views))
            sum(model(view).float().square().mean() for view in views).backward()
            _settled(device)
            seconds.append(time.perf_counter() - start)
        for parameter in model.parameters():
            parameter.grad = None
        model.load_state_dict(model.state_dict() | before)
        model.train(was_training)
        step = statistics.median(seconds[1:])
        return Speed(step, step / (3 * images))  # a backward pass costs two forward ones

    def steps_within(self, seconds: float, images: int) -> int:
        """How many steps fit, for a run with so many images."""
        return max(LEAST_STEPS, int((seconds - _PASSES * images * self.image) / (_OVERHEAD * self.step)))

    def plan(self, steps: int, images: int, state: Any) -> dict[str, Any]:
        """What a run takes: steps, seconds, bytes of memory and of disk. `state`: what a checkpoint holds of it."""
        held = sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
        return {
            "steps": steps,
            "seconds": _OVERHEAD * self.step * steps + _PASSES * images * self.image,
            "memory_bytes": psutil.Process().memory_info().rss,
            "disk_bytes": 2 * held,  # the last checkpoint and the best
        }


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
