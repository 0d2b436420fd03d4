"""Batch norm over the batches of all processes, without replacing a module of the base.

torch's SyncBatchNorm is a module, and for GPUs only; this takes the place of the function that all modules call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class SyncNorm(TorchFunctionMode):
    """Within, `F.batch_norm` in training mode takes mean and variance over all processes' batches."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.batch_norm:
            names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
            given: dict[str, Any] = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
            given |= dict(zip(names, args, strict=False)) | kwargs
            if given["training"]:
                return _batch_norm(**given)
        return func(*args, **kwargs)


class _Sum(torch.autograd.Function):
    """The sum over all processes. Each one's loss depends on it, so its gradient is their sum as well."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Sum.forward(ctx, gradient)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    x = input.float()
    over = [dim for dim in range(x.ndim) if dim != 1]
    n = x.numel() // x.shape[1] * dist.get_world_size()
    mean = _Sum.apply(x.sum(over)) / n
    shape = [1, -1, *(1 for _ in over[1:])]
    centred = x - mean.view(shape)
    var = _Sum.apply(centred.square().sum(over)) / n
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (n / max(n - 1, 1))).to(running_var.dtype), momentum)
    out: Tensor = centred * torch.rsqrt(var + eps).view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(input.dtype)
