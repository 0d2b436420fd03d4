"""Batch-norm statistics: they belong to the mask, the base keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .members import member_key


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


def set_norm_modes(model: nn.Module, norm: str) -> None:
    """Of a model in train mode, put the layers that normalise by a batch in the mode that a policy wants."""
    if norm in ("frozen", "anchored"):
        for layer in norm_layers(model).values():
            layer.train(norm == "anchored" and can_be_anchored(layer))


@contextmanager
def momentum_of(layers: Iterable[nn.Module], share: float) -> Iterator[None]:
    """Within, a batch has this share in the layers' running statistics; 1, 1/2, 1/3, ... make a plain average."""
    momenta = [(layer, layer.momentum) for layer in layers]
    try:
        for layer, _ in momenta:
            layer.momentum = share  # type: ignore[assignment]
        yield
    finally:
        for layer, momentum in momenta:
            layer.momentum = momentum


class Anchor(nn.Module):
    """Batch statistics that start from the base's own: they follow what the mask does, not what the images are like.

    On images unlike those of its training, a base that switches to their statistics is another network before any
    weight is off: channels that hardly vary there are blown up. With the statistics it came with, in turn, a few
    weights off shift every layer after them. So layers normalise by the batch, as in training, and then take back what
    that alone would change. With m, v what a layer of the base sees on some images, and m', v' the statistics that the
    base came with, they use, in train mode,

        scale * sqrt(v / v')  for their scale,    bias + scale * (m - m') / sqrt(v')  for their bias.

    With all weights on, this is the base in eval mode, on average. Layers that have no scale or bias to do it with
    keep the statistics of the base.

    v is the variance that layers divide by in train mode, over n values; their running averages are of v n / (n - 1).
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._names = [name for name, layer in norm_layers(base).items() if can_be_anchored(layer)]
        for name in self._names:
            layer = base.get_submodule(name)
            for key in ("mean", "var"):
                self.register_buffer(f"{member_key(name)}:{key}", layer.get_buffer(f"running_{key}").detach().clone())
            self.register_buffer(f"{member_key(name)}:share", torch.ones_like(layer.get_buffer("running_var")[0]))

    def _seen(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance, and (n - 1) / n: what turns running variances into such ones."""
        key = member_key(name)
        return self.get_buffer(f"{key}:mean"), self.get_buffer(f"{key}:var"), self.get_buffer(f"{key}:share")

    @torch.no_grad()
    def measure(self, run: Callable[[Tensor], object], base: nn.Module, batches: Iterable[Tensor]) -> None:
        """Take down what the layers of the base see when it is run on these batches: plain averages over them."""
        seen: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in self._names}
        handles = [
            base.get_submodule(name).register_forward_pre_hook(partial(_take_down, seen[name])) for name in self._names
        ]
        count = 0
        try:
            for batch in batches:
                run(batch)
                count += 1
        finally:
            for handle in handles:
                handle.remove()
        if not count:
            raise ConfigError("an anchor needs at least one batch", found="none")
        for name, calls in seen.items():
            if calls:  # layers that the base does not run have nothing to take back
                for part, values in zip(self._seen(name), zip(*calls, strict=True), strict=True):
                    part.copy_(torch.stack(values).mean(0))

    def in_training(self, base: nn.Module, learned: nn.Module | None = None) -> dict[str, Tensor]:
        """The scales and biases that make layers in train mode what the base's are in eval mode.

        learned: a copy of the base whose scales and biases may have been trained: then it is they that are corrected.
        What layers do before they scale does not depend on them, so `in_evaluation` holds for them, too.
        """
        replacements = {}
        for name in self._names:
            own: Any = base.get_submodule(name)
            mean, var, _ = self._seen(name)
            spread = (own.running_var + own.eps).sqrt()
            if learned is None:
                scale, bias = own.weight.detach(), own.bias.detach()
            else:
                layer: Any = learned.get_submodule(name)
                scale, bias = layer.weight, layer.bias
            replacements[f"{name}.weight"] = scale * (var + own.eps).sqrt() / spread
            replacements[f"{name}.bias"] = bias + scale * (mean - own.running_mean) / spread
        return replacements

    def in_evaluation(self, base: nn.Module, now: dict[str, Tensor]) -> dict[str, Tensor]:
        """The statistics that, with the base's own scales and biases, do the same in eval mode.

        now: what the layers see with the mask, in train mode and on the images that were measured.
        """
        statistics = {}
        for name in self._names:
            own: Any = base.get_submodule(name)
            mean, var, share = self._seen(name)
            factor = (now[f"{name}.running_var"] * share + own.eps) / (var + own.eps)
            # Variances are no less than 0: where one would be, a channel is all but dead, and its mean is what counts.
            factor = factor.maximum(own.eps / (own.running_var + own.eps))
            shift = (own.running_mean - mean) * factor.sqrt()
            statistics[f"{name}.running_mean"] = now[f"{name}.running_mean"] + shift
            statistics[f"{name}.running_var"] = ((own.running_var + own.eps) * factor - own.eps).clamp(min=0)
        return statistics


def can_be_anchored(layer: nn.Module) -> bool:
    """Whether a layer has the scale and bias that take back a change of statistics, and the momentum of an average."""
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        return False  # in train mode it looks at each image by itself
    return all(isinstance(getattr(layer, name, None), Tensor) for name in ("weight", "bias", "running_var")) and all(
        hasattr(layer, name) for name in ("eps", "momentum")
    )


def _take_down(calls: list[tuple[Tensor, ...]], _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    over = [dim for dim in range(inputs[0].ndim) if dim != 1]
    x = inputs[0].float()
    n = x.numel() // x.shape[1]
    calls.append((x.mean(over), x.var(over, correction=0), torch.tensor((n - 1) / n)))
