"""Several processes that train together: started by torchrun (or not), set up by accelerate."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn

from ..errors import ConfigError

T = TypeVar("T")


class Processes:
    """This process among those of the run: one that trains alone, or one of those that torchrun started."""

    def __init__(self) -> None:
        state = PartialState(cpu=not torch.cuda.is_available())
        self.rank: int = state.process_index
        self.count: int = state.num_processes
        self.device: torch.device = state.device
        if self.count > 1:
            # Threads of the process group that outlive the interpreter abort the process at times.
            atexit.unregister(_leave)
            atexit.register(_leave)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    @property
    def workers(self) -> int:
        """How many processes may make views ahead: none on a CPU, which training keeps busy, else up to 8."""
        if self.device.type == "cpu":
            return 0
        return min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def part(self, n: int) -> slice:
        """This process's part of n items that all processes share."""
        if n % self.count:
            raise ConfigError(
                "the batch cannot be divided evenly among the processes",
                expected=f"a batch size that is a multiple of {self.count}",
                found=n,
            )
        return slice(n // self.count * self.rank, n // self.count * (self.rank + 1))

    def average_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its mean over all processes."""
        if self.count == 1:
            return
        pending = []
        for tensor in tensors:
            pending.append((tensor, dist.all_reduce(tensor, async_op=True)))
        for tensor, work in pending:
            work.wait()
            tensor.div_(self.count)

    def average_gradients(self, *modules: nn.Module) -> None:
        gradients = (parameter.grad for module in modules for parameter in module.parameters())
        self.average_(gradient for gradient in gradients if gradient is not None)

    def from_main(self, make: Callable[[], T]) -> T:
        """What the main process makes, in all processes; an error there is an error in all, so that none waits."""
        if self.count == 1:
            return make()
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = make()
            except Exception as error:
                box[1] = error
        dist.broadcast_object_list(box)
        if box[1] is not None:
            box[1].of_main = not self.is_main
            raise box[1]
        value: T = box[0]
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process: all get the same answer."""
        if self.count == 1:
            return flag
        flags = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(flags)
        return bool(flags > 0)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
