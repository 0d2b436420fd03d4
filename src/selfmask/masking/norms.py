"""Batch-norm statistics: they belong to the mask, the base keeps its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that keep running statistics (batch norm and its kin), by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "running_mean", None), Tensor)
    }


def norm_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics of every such layer, by buffer name."""
    return {
        f"{name}.{key}" if name else key: value
        for name, module in norm_layers(model).items()
        for key, value in module.named_buffers(recurse=False)
        if key in ("running_mean", "running_var", "num_batches_tracked")
    }


def saved_statistics(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a mask file keeps of them: means and variances; the batch counter changes no output."""
    return {name: value for name, value in buffers.items() if not name.endswith("num_batches_tracked")}


@contextmanager
def cumulative_average(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Within, running statistics are the plain average over all batches, not an exponential one."""
    momenta = [(layer, layer.momentum) for layer in layers]
    try:
        for layer, _ in momenta:
            layer.momentum = None  # type: ignore[assignment]
        yield
    finally:
        for layer, momentum in momenta:
            layer.momentum = momentum


def reset_statistics(buffers: dict[str, Tensor]) -> None:
    """Mean 0, variance 1, no batches seen: the start of a re-estimation."""
    with torch.no_grad():
        for name, value in buffers.items():
            value.fill_(1 if name.endswith("running_var") else 0)
