"""Methods of a module, called with other tensors in place of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def call_with(
    tensors: Mapping[str, Tensor], module: nn.Module, method: str, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    """Any method of a module, with these tensors in place while it runs."""
    named = {f"module.{name}": value for name, value in tensors.items()}
    return functional_call(_Method(module, method), named, tuple(args), kwargs, tie_weights=False)


class _Method(nn.Module):
    """A method of a module, where a module is wanted."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, self.method)(*args, **kwargs)
