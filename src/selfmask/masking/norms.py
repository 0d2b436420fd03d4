"""Batch-norm statistics: they belong to the mask, the base keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

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
def plain_average(layers: Iterable[nn.Module]) -> Iterator[Callable[[], None]]:
    """Within, running statistics are plain averages over batches; call what is yielded before each batch."""
    momenta = [(layer, layer.momentum) for layer in layers]
    seen = 0

    def next_batch() -> None:
        nonlocal seen
        seen += 1
        for layer, _ in momenta:
            layer.momentum = 1 / seen  # type: ignore[assignment]

    try:
        yield next_batch
    finally:
        for layer, momentum in momenta:
            layer.momentum = momentum
