"""A view of a base in which every image may have a mask of its own (`mixing.py` says how and why)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .masked_product import LANES, ROWS, masked_product
from .mixed_masks import Own, Plan
from .switching import OffWeights, dense, flat, within
from .views import view_of

_MANY = 200  # places in which a layer uses each weight: from there on, weights written for a mask are worth it
Numbers = npt.NDArray[np.int64]


class MixedView:
    """One thread may use it at a time.

    >>> view.put([(own_of_a, 3), (own_of_b, 1)])
    >>> vectors = view.module(images)  # three images of a, and one of b
    """

    def __init__(self, plan: Plan) -> None:
        self.module = view_of(plan.base, {}, {})
        weights = {name: self.module.get_parameter(name) for name in plan.places}
        modules = {name: self.module.get_submodule(name.rpartition(".")[0]) for name in weights}
        kinds = {name: _kind(each, plan.places[name]) for name, each in modules.items()}
        written = [weights[name].numel() for name, kind in kinds.items() if kind is _Written]
        room = torch.empty(max(written, default=0), dtype=torch.float32, device="cpu")
        self._layers = {name: kind(modules[name], room) for name, kind in kinds.items()}
        self._norms = [_Norm(self.module.get_submodule(name)) for name in plan.norms]
        self._channels = [len(each) for each in weights.values()]

    @torch.no_grad()
    def put(self, groups: Sequence[tuple[Own, int]]) -> None:
        """Set whose images come next: so many of one mask, then so many of the next."""
        ends = np.cumsum([count for _, count in groups])
        scales = torch.stack([own.scales for own, _ in groups]).split_with_sizes(self._channels, 1)
        for (name, layer), scale in zip(self._layers.items(), scales, strict=True):
            layer.put(ends, [own.off.get(name) for own, _ in groups], scale.contiguous())
        if self._norms:
            means, variances = (torch.stack([getattr(own, key) for own, _ in groups]) for key in ("means", "variances"))
            scale = torch.rsqrt(variances + torch.cat([each.eps for each in self._norms])) * torch.cat(
                [each.weight for each in self._norms]
            )
            shift = torch.cat([each.bias for each in self._norms]) - means * scale
            counts = torch.tensor([count for _, count in groups])
            sizes = [len(each.weight) for each in self._norms]
            for norm, *own in zip(
                self._norms, *(each.repeat_interleave(counts, 0).split_with_sizes(sizes, 1) for each in (scale, shift)),
                strict=True,
            ):  # fmt: skip
                norm.scale, norm.shift = (each[:, :, None, None] for each in own)

    def clear(self) -> None:
        """Hold on to no mask."""
        for layer in self._layers.values():
            layer.put(np.zeros(0, np.int64), [], torch.empty(0))


class _Layer:
    """A layer in which every mask has its images, in a way that subclasses know."""

    def __init__(self, module: Any, room: Tensor) -> None:
        """room: memory to write weights into."""
        self.module, self.room = module, room
        self.put(np.zeros(0, np.int64), [], torch.empty(0))
        module.forward = self.forward

    def put(self, ends: Numbers, off: Sequence[OffWeights | None], scales: Tensor) -> None:
        """ends: where the images of each mask end. scales: 1 / alpha [masks, channels]."""
        self.ends, self.off, self.scales = ends, off, scales

    def forward(self, input: Tensor) -> Tensor:  # as modules name it
        expected = int(self.ends[-1]) if len(self.ends) else 0
        if len(input) != expected:  # of a base that has images elsewhere, or divides them
            raise ValueError(f"expected {expected} images, found {len(input)}")
        y, bias = self.run(input), self.module.bias
        if bias is not None:
            y += bias.view(-1, 1, 1) if isinstance(self.module, nn.Conv2d) else bias
        return y

    def run(self, x: Tensor) -> Tensor:
        """Without bias."""
        raise NotImplementedError


class _Written(_Layer):
    """Writes the weights of each mask; images of masks that leave the layer as it is are run together."""

    def run(self, x: Tensor) -> Tensor:
        parts = [self._run(x[part], off) for part, off in self._parts()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _parts(self) -> Iterator[tuple[slice, OffWeights | None]]:
        begin = 0
        for number, (end, off) in enumerate(zip(self.ends.tolist(), self.off, strict=True)):
            last = number + 1 == len(self.off)
            if off is not None or last or self.off[number + 1] is not None:
                yield slice(begin, end), off
                begin = end

    def _run(self, x: Tensor, off: OffWeights | None) -> Tensor:
        own = self.module
        weight: Tensor = own.weight
        if off is not None:
            out = within(self.room, dense(weight))
            off.write(flat(dense(weight)), flat(out))
            weight = out
        if isinstance(own, nn.Linear):
            return F.linear(x, weight)
        return F.conv2d(x, weight, None, own.stride, own.padding, own.dilation)


class _Masked(_Layer):
    """Masks the weights as they come: `masked_product`."""

    def __init__(self, module: Any, room: Tensor) -> None:
        super().__init__(module, room)
        self._weight = flat(module.weight.detach()).numpy()

    def put(self, ends: Numbers, off: Sequence[OffWeights | None], scales: Tensor) -> None:
        super().put(ends, off, scales)
        codes = [_code(each) for each in off]
        self._codes = np.array([each.ctypes.data for each in codes], np.int64)
        self._counts = np.array([-1 if each.dtype == np.uint8 else len(each) for each in codes], np.int64)

    def run(self, x: Tensor) -> Tensor:
        own = self.module
        channels = x.shape[-1 if isinstance(own, nn.Linear) else 1]
        if channels != own.weight.shape[1] or x.dtype != torch.float32:  # else what lies beyond would be read
            raise ValueError(f"expected {own.weight.shape[1]} channels of float32, found {channels} of {x.dtype}")
        if isinstance(own, nn.Linear):
            inputs = x.reshape(-1, channels).contiguous()
            where, shape = _along(*inputs.shape, len(own.weight)), (*x.shape[:-1], len(own.weight))
        else:
            (up, left), (high, wide) = own.padding, x.shape[2:]
            inputs = x.permute(0, 2, 3, 1).contiguous()
            if up or left:
                padded = inputs.new_zeros(len(x), high + 2 * up, wide + 2 * left, channels)
                padded[:, up : up + high, left : left + wide] = inputs
                inputs = padded
            where = _across(tuple(inputs.shape), tuple(own.weight.shape), own.stride, own.dilation)
            shape = len(x), *where.sides, len(own.weight)
        y = inputs.new_empty(shape)
        self._multiply(inputs, where, y)
        return y if isinstance(own, nn.Linear) else y.permute(0, 3, 1, 2)

    def _multiply(self, x: Tensor, where: _Where, y: Tensor) -> None:
        places = len(where.starts) // len(y)  # of an image
        product: Callable[[int, int], None] = partial(
            masked_product,
            self._weight, x.view(-1).numpy(), where.starts, where.runs, where.run, self.ends * places,
            self._codes, self._counts, self.scales.numpy(), y.view(-1).numpy(), where.outs,
        )  # fmt: skip
        count, threads = len(self.module.weight), torch.get_num_threads()
        if threads == 1:
            product(0, count)
            return
        step = -(-count // (threads * ROWS)) * ROWS
        parts = [_pool().submit(product, begin, min(begin + step, count)) for begin in range(0, count, step)]
        wait(parts)  # all of them: the masks, of which they have addresses, may be gone afterwards
        for part in parts:
            part.result()


_NONE = np.zeros(0, np.uint16)  # weights off


def _code(off: OffWeights | None) -> npt.NDArray[Any]:
    """Gaps, or bits."""
    found = _NONE if off is None else off.gaps if off.bits is None else off.bits
    assert found is not None
    return found


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="product")


class _Where(NamedTuple):
    """Where a product finds its inputs and puts its outputs: see `masked_product`."""

    starts: Numbers
    runs: Numbers
    run: int
    outs: Numbers
    sides: tuple[int, ...]


@lru_cache(maxsize=256)
def _along(places: int, width: int, outputs: int) -> _Where:
    """Of vectors that lie one after the other."""
    numbers = np.arange(places, dtype=np.int64)
    return _Where(numbers * width, np.zeros(1, np.int64), width, numbers * outputs, ())


@lru_cache(maxsize=256)
def _across(
    images: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> _Where:
    """Of a convolution: its kernel lies on each place of padded images [count, height, width, channels]. Rows of the
    kernel meet pixels that lie one after the other, unless it has holes; then each of its pixels is a run."""
    count, high, wide, channels = images
    outputs, _, *kernel = weight
    sides = tuple(
        (side - hole * (size - 1) - 1) // step + 1
        for side, size, step, hole in zip((high, wide), kernel, stride, dilation, strict=True)
    )
    line = wide * channels
    whole = dilation[1] == 1 or kernel[1] == 1
    starts = _sums([count, *sides], [high * line, stride[0] * line, stride[1] * channels])
    runs = _sums([kernel[0], 1 if whole else kernel[1]], [dilation[0] * line, dilation[1] * channels])
    outs = np.arange(len(starts), dtype=np.int64) * outputs
    return _Where(starts, runs, channels * (kernel[1] if whole else 1), outs, sides)


def _sums(sizes: Sequence[int], strides: Sequence[int]) -> Numbers:
    """Where the entries of an array with such strides lie."""
    found = np.zeros((), np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        found = found[..., None] + np.arange(size, dtype=np.int64) * stride
    return found.ravel()


class _Norm:
    def __init__(self, module: Any) -> None:
        size = len(module.running_mean)
        self.weight = torch.ones(size) if module.weight is None else module.weight.detach()
        self.bias = torch.zeros(size) if module.bias is None else module.bias.detach()
        self.eps = torch.full((size,), module.eps)
        self.scale = self.shift = torch.empty(0)
        module.forward = self.forward

    def forward(self, input: Tensor) -> Tensor:  # as modules name it
        return torch.addcmul(self.shift, input, self.scale)


def _kind(module: Any, places: int) -> type[_Layer]:
    """Masked, if each weight is used in few places, and rows can be divided into steps."""
    weight: Tensor = module.weight
    if isinstance(module, nn.Linear):
        run, ordered = weight.shape[1], weight.is_contiguous()
    else:
        holes = module.dilation[1] > 1
        run = weight.shape[1] * (1 if holes else weight.shape[3])
        ordered = weight.permute(0, 2, 3, 1).is_contiguous()
    return _Masked if places < _MANY and ordered and run % LANES == 0 and len(weight) % ROWS == 0 else _Written
