"""A view of a base in which every image may have a mask of its own (`mixing.py` says how and why)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .corrections import Correction, Corrections, Plan
from .switching import OffWeights, dense, flat, within
from .views import view_of


class MixedView:
    """One thread may use it at a time.

    >>> view.put([(corrections_of_a, 3), (corrections_of_b, 1)])
    >>> vectors = view.module(images)  # three images of a, and one of b
    """

    def __init__(self, plan: Plan, packed: Mapping[str, Tensor]) -> None:
        """packed: of `packed_weights`."""
        self.module = view_of(plan.base, {}, {})
        weights = {name: self.module.get_parameter(name) for name in plan.places}
        room = torch.empty(max((each.numel() for each in weights.values()), default=0))
        modules = {name: self.module.get_submodule(name.rpartition(".")[0]) for name in weights}
        self._layers = {name: _layer(each, room, packed.get(name)) for name, each in modules.items()}
        self._norms = [_Norm(self.module.get_submodule(name)) for name in plan.norms]
        self._channels = [len(each) for each in weights.values()]

    @torch.no_grad()
    def put(self, groups: Sequence[tuple[Corrections, int]]) -> None:
        """Say of which mask the images of the next passes are: so many of one, then so many of the next."""
        counts = torch.tensor([count for _, count in groups])
        ends = counts.cumsum(0).tolist()
        parts = [(slice(end - count, end), each) for end, (each, count) in zip(ends, groups, strict=True)]
        scales = _stacked([each.scales for each, _ in groups], counts).split_with_sizes(self._channels, 1)
        for (name, layer), scale in zip(self._layers.items(), scales, strict=True):
            layer.put(name, parts, scale)
        if self._norms:
            means, variances = (
                _stacked([getattr(each, key) for each, _ in groups], counts) for key in ("means", "variances")
            )
            scale = torch.rsqrt(variances + torch.cat([each.eps for each in self._norms])) * torch.cat(
                [each.weight for each in self._norms]
            )
            shift = torch.cat([each.bias for each in self._norms]) - means * scale
            sizes = [len(each.weight) for each in self._norms]
            for norm, *own in zip(
                self._norms, scale.split_with_sizes(sizes, 1), shift.split_with_sizes(sizes, 1), strict=True
            ):
                norm.scale, norm.shift = (each[:, :, None, None] for each in own)

    def clear(self) -> None:
        """Hold on to no mask."""
        for name, layer in self._layers.items():
            layer.put(name, [], torch.empty(0))


def packed_weights(plan: Plan, size: tuple[int, int]) -> dict[str, Tensor]:
    """The weights of convolutions in the layout in which oneDNN uses them, for images of this size: else it would bring
    them into it in every pass. None where this PyTorch has no such thing; results are the same to the bit."""
    found: dict[str, Tensor] = {}
    view = view_of(plan.base, {}, {})

    def pack(module: Any, inputs: tuple[Tensor], name: str) -> None:
        found[name] = torch.ops.mkldnn._reorder_convolution_weight(
            module.weight.contiguous(), module.padding, module.stride, module.dilation, 1, inputs[0].shape
        )

    for name in plan.places:
        module = view.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(lambda module, inputs, name=name: pack(module, inputs, name))
    images = torch.zeros(8, 3, *size).contiguous(memory_format=torch.channels_last)
    try:
        with torch.inference_mode():
            view(images)
    except (AttributeError, RuntimeError):
        return {}
    return found


def _stacked(vectors: list[Tensor], counts: Tensor) -> Tensor:
    """A row for each image."""
    return torch.stack(vectors).repeat_interleave(counts, 0)


class _Layer:
    """A layer that corrects its outputs; of a kind that subclasses know."""

    def __init__(self, module: Any, room: Tensor, packed: Tensor | None) -> None:
        """room: memory to write weights into."""
        self.module, self.packed, self._room = module, packed, room
        self._runs: list[tuple[slice, OffWeights | None]] = []
        self.fixes: list[tuple[slice, Correction]] = []
        self._scale, self._count = torch.empty(0), 0
        module.forward = self.forward

    def put(self, name: str, groups: Sequence[tuple[slice, Corrections]], scale: Tensor) -> None:
        self._scale, self._count, self._runs = scale, len(scale), []
        for part, each in groups:
            off = each.apart.get(name)
            if off is None and self._runs and self._runs[-1][1] is None:  # goes on as the one before
                self._runs[-1] = slice(self._runs[-1][0].start, part.stop), None
            else:
                self._runs.append((part, off))
        self.fixes = [(part, each.shared[name]) for part, each in groups if name in each.shared]

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != self._count:  # of a base that has images elsewhere, or divides them
            raise ValueError(f"expected {self._count} images, found {len(x)}")
        parts = [
            self.base(x[part]) if off is None else self.run(x[part], self._written(off)) for part, off in self._runs
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.fixes:
            self.fix(x, y)
            y *= self._scale.view(self._count, *self.channels(y))
        if self.module.bias is not None:
            y += self.module.bias.view(self.channels(y))
        return y

    def _written(self, off: OffWeights) -> Tensor:
        weight: Tensor = self.module.weight
        out = within(self._room, dense(weight))
        off.write(flat(dense(weight)), flat(out))
        return out

    def base(self, x: Tensor) -> Tensor:
        """With the base's own weights, without bias."""
        return self.run(x, self.module.weight)

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def fix(self, x: Tensor, y: Tensor) -> None:
        """Take away what the weights that are off have added."""
        raise NotImplementedError

    def channels(self, y: Tensor) -> tuple[int, ...]:
        """The shape of a vector of channels, for calculating with the outputs of an image."""
        raise NotImplementedError


class _Linear(_Layer):
    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def fix(self, x: Tensor, y: Tensor) -> None:
        for part, each in self.fixes:
            y[part] -= each.times(x[part].flatten(0, -2).T.contiguous()).T.view(y[part].shape)

    def channels(self, y: Tensor) -> tuple[int, ...]:
        return (*[1] * (y.ndim - 2), -1)


class _Convolution(_Layer):
    def __init__(self, module: Any, room: Tensor, packed: Tensor | None) -> None:
        super().__init__(module, room, packed)
        weight: Tensor = module.weight
        self._order = sorted(
            range(3), key=lambda side: (-weight.stride(side + 1), side)
        )  # in which a row lies in memory
        self._sides = tuple(weight.shape[side + 1] for side in self._order)
        self._numbers = torch.arange(weight[0].numel(), dtype=torch.int32)

    def base(self, x: Tensor) -> Tensor:
        own = self.module
        if self.packed is None:
            return super().base(x)
        y: Tensor = torch.ops.mkldnn._convolution_pointwise(
            x, self.packed, None, own.padding, own.stride, own.dilation, 1, "none", [], ""
        )
        return y

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, None, self.module.stride, self.module.padding, self.module.dilation)

    def fix(self, x: Tensor, y: Tensor) -> None:
        """A column of the weight belongs to a place of the kernel and a channel, whose pixels it meets there."""
        own = self.module
        (up, left), (high, wide) = own.padding, x.shape[2:]
        padded = x.new_zeros(*x.shape[:2], high + 2 * up, wide + 2 * left)
        padded[:, :, up : up + high, left : left + wide] = x
        image, channel, row, pixel = padded.stride()
        column = tuple((channel, own.dilation[0] * row, own.dilation[1] * pixel)[side] for side in self._order)
        place = image, own.stride[0] * row, own.stride[1] * pixel
        columns = _offsets(self._sides, column).flatten()
        for part, each in self.fixes:
            shape = part.stop - part.start, *y.shape[2:]
            if len(each.columns) < len(self._numbers):  # only those columns
                at = columns.index_select(0, each.columns)[:, None] + _offsets(shape, place).flatten()
                table = padded[part].flatten().index_select(0, at.flatten()).view(at.shape)
                product = each.times(table, self._numbers[: len(each.columns)])
            else:
                met = padded.as_strided((*self._sides, *shape), (*column, *place), part.start * image)
                product = each.times(met.reshape(len(self._numbers), -1))
            y[part] -= product.view(-1, *shape).transpose(0, 1)

    def channels(self, y: Tensor) -> tuple[int, ...]:
        return -1, 1, 1


@lru_cache(maxsize=1024)
def _offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Where the entries of a tensor lie in memory."""
    found = torch.zeros((), dtype=torch.int32)
    for size, stride in zip(shape, strides, strict=True):
        found = found[..., None] + torch.arange(0, size * stride, stride, dtype=torch.int32)
    return found


class _Norm:
    def __init__(self, module: Any) -> None:
        size = len(module.running_mean)
        self.weight = torch.ones(size) if module.weight is None else module.weight.detach()
        self.bias = torch.zeros(size) if module.bias is None else module.bias.detach()
        self.eps = torch.full((size,), module.eps)
        self.scale = self.shift = torch.empty(0)
        module.forward = self.forward

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale)


def _layer(module: nn.Module, room: Tensor, packed: Tensor | None) -> _Layer:
    return (_Linear if isinstance(module, nn.Linear) else _Convolution)(module, room, packed)
