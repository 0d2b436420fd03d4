"""Several processes that train together: started by torchrun (or not), set up by accelerate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

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
        self._state = state

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    def wait(self) -> None:
        self._state.wait_for_everyone()

    def part(self, n: int) -> slice:
        """This process's part of n items that all processes share."""
        if n % self.count:
            raise ConfigError(
                "the batch cannot be shared out among the processes",
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

    def share(self, value: T) -> T:
        """The main process's value, in all processes."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process: all get the same answer."""
        if self.count == 1:
            return flag
        flags = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(flags)
        return bool(flags > 0)
