"""The effective weight W * M / alpha and its straight-through gradient, for one tensor."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bits = npt.NDArray[np.uint8]
Scales = tuple[float, ...]
"""1 / alpha of a tensor, or of each of its equal parts, which lie one below the other."""


BitOrder = Literal["big", "little"]
"""Which bit of a byte comes first, as in numpy.packbits: files have the highest first."""


@cache
def _bits_of_pairs(device: torch.device, dtype: torch.dtype, order: BitOrder) -> Tensor:
    """Row b holds the sixteen bits of the two bytes that this machine reads as b."""
    pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    return torch.from_numpy(np.unpackbits(pairs, bitorder=order).reshape(-1, 16)).to(device, dtype)


@cache
def _zero(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), device=device, dtype=dtype)


def count_ones(mask: Tensor) -> Tensor:
    """How many entries of a mask of zeros and ones are on: a float32 sum is faster, and exact up to 2^24."""
    if mask.dtype == torch.float32 and mask.numel() <= 1 << 24:
        return mask.sum().long()
    return torch.count_nonzero(mask)


def inverse_alpha(active: int, n: int) -> float:
    """1 / alpha with alpha = sqrt(mean M); 0 where every weight is off, which gives zeros and not NaN."""
    return (n / active) ** 0.5 if active else 0.0


def apply_mask_(mask: Tensor, weight: Tensor, scales: Scales) -> None:
    """Turn a mask of zeros and ones, in place, into W * M / alpha: one pass over the memory."""
    zero = _zero(mask.device, mask.dtype)
    for part, own, inv_alpha in zip(_divided(mask, scales), _divided(weight, scales), scales, strict=True):
        torch.addcmul(zero, own, part, value=inv_alpha, out=part)


def _divided(tensor: Tensor, scales: Scales) -> Sequence[Tensor]:
    return (tensor,) if len(scales) == 1 else tensor.chunk(len(scales))


def unpack_mask_(packed: Bits, chosen: Tensor | None, out: Tensor, order: BitOrder = "big") -> None:
    """Write a bit-packed mask as zeros and ones into `out`; a look-up of two bytes at once beats unpacking bits."""
    if chosen is not None:
        bits = torch.from_numpy(np.unpackbits(packed, count=int(chosen.sum()), bitorder=order))
        out.fill_(1)
        out[chosen] = bits.to(out.device, out.dtype)
        return
    padded = np.append(packed, np.uint8(0)) if packed.size % 2 else packed
    index = torch.from_numpy(padded.view(np.uint16).astype(np.int32)).to(out.device)
    table = _bits_of_pairs(out.device, out.dtype, order)
    if out.is_contiguous() and out.numel() == 16 * index.numel():
        torch.index_select(table, 0, index, out=out.view(-1, 16))
    else:
        out.copy_(table.index_select(0, index).flatten()[: out.numel()].view(out.shape))


class EffectiveWeight:
    """The memory and the graph of one tensor's effective weight.

    A training step may run the backbone several times (multi-crop); the effective weight is computed once and
    shared until a backward has run: scores are then about to change, and not every optimizer leaves a trace of it.
    The memory is used again and again, because fresh pages cost more than the arithmetic, but never while a graph
    waits for its backward, or one runs in another thread.
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.output: Tensor | None = None
        self.pending = False
        self.times_used = 0  # the buffer, for other weights

    def blank(self, weight: Tensor) -> Tensor:
        """Memory of the weight's shape to write a mask into."""
        with _changing:
            old, pending = self.buffer, self.pending
            self.output, self.pending = None, False
            self.times_used += 1
            if (
                old is None
                or pending
                or _is_held_elsewhere(old)
                or (old.shape, old.dtype, old.device, old.stride())
                != (weight.shape, weight.dtype, weight.device, weight.stride())
            ):
                self.buffer = torch.empty_like(weight, requires_grad=False)
            assert self.buffer is not None
            return self.buffer

    def finish(self, score: Tensor | None, weight: Tensor, scales: Scales, detach_alpha: bool) -> Tensor:
        """Tie the effective weight in the buffer to `score`, where a gradient is wanted."""
        assert self.buffer is not None
        output = self.buffer if score is None else _StraightThrough.apply(score, weight, self, scales, detach_alpha)
        with _changing:
            self.output, self.pending = output, score is not None
        return output

    def held(self, buffer: Tensor, time: int) -> Tensor:
        """What a backward reads: nobody writes to it as long as this is held."""
        with _changing:
            if self.buffer is buffer and self.times_used != time:  # as autograd does with tensors that it saves itself
                raise RuntimeError(
                    "the scores changed between this forward pass and its backward pass; run the forward pass again"
                )
            return buffer.detach()

    def used_up(self, buffer: Tensor, time: int) -> None:
        """A backward has run: what it went through is not to be shared any more."""
        with _changing:
            if self.buffer is buffer and self.times_used == time:
                self.output, self.pending = None, False


_changing = threading.RLock()  # one for all: it is held for the blink of an eye


class _StraightThrough(torch.autograd.Function):
    """Forward: the effective weight. Backward: dL/dM, handed to the score as it is."""

    @staticmethod
    def forward(
        ctx: Any, score: Tensor, weight: Tensor, slot: EffectiveWeight, scales: Scales, detach_alpha: bool
    ) -> Tensor:
        assert slot.buffer is not None
        # Kept as attributes, since saved tensors are freed by the first backward and several losses may share
        # this node. Nothing is copied: the base weight is there already, and the buffer is what we return.
        ctx.weight, ctx.buffer, ctx.scales, ctx.detach_alpha = weight, slot.buffer, scales, detach_alpha
        ctx.time = slot.times_used
        # Weak, because the slot holds the output, which holds this node: the loop would never be collected.
        ctx.slot = weakref.ref(slot)
        return slot.buffer.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # dL/dM_i = g_i w_i / alpha - (sum_j g_j w_j m_j) / (2 N alpha^3); the second term is alpha's share.
        # Where every weight is off there is no such alpha; one weight alone would have sqrt(1 / N), and with that the
        # scores can find their way back.
        weight, slot, scales = ctx.weight, ctx.slot(), ctx.scales
        effective = ctx.buffer if slot is None else slot.held(ctx.buffer, ctx.time)
        # Fresh memory costs more than the arithmetic: a gradient that nobody else holds is written over.
        into = grad if _is_ours_alone(grad) and grad.stride() == weight.stride() else torch.empty_like(grad)
        parts = zip(scales, *(_divided(each, scales) for each in (weight, grad, effective, into)), strict=True)
        for scale, own, gradient, product, out in parts:
            inv_alpha = scale or own.numel() ** 0.5
            if ctx.detach_alpha:
                offset = _zero(grad.device, grad.dtype)
            else:
                offset = _dot(gradient, product).mul_(-(inv_alpha**2) / (2 * own.numel())).to(grad.dtype)
            torch.addcmul(offset, gradient, own, value=inv_alpha, out=out)
        grad_mask = into
        if slot is not None:
            slot.used_up(ctx.buffer, ctx.time)
        return grad_mask.float(), None, None, None, None


def _is_ours_alone(grad: Tensor) -> bool:
    """Whether nobody but the caller holds this tensor or shares its memory.

    Autograd hands one tensor to several nodes where it can: the gradient of a sum goes to all that was added up. Who
    holds a tensor only private functions of PyTorch tell: where a release lacks one, no gradient counts as ours alone.
    """
    if not _is_dense(grad) or _ONE_HOLDER is None:
        return False
    return _uses(grad) == 1 and _holders(grad) == _ONE_HOLDER


def _is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether a graph, or another tensor of the same memory, holds it; not where that cannot be told."""
    return _ONE_HOLDER is not None and (_uses(tensor) not in (1, None) or _holders(tensor) != _ONE_HOLDER)


def _uses(tensor: Tensor) -> int | None:
    """How many hold the tensor."""
    try:
        return int(tensor._use_count())
    except (AttributeError, TypeError):
        return None


def _holders(tensor: Tensor) -> int | None:
    """How many hold its memory, ourselves included: asking makes one more."""
    try:
        return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
    except (AttributeError, TypeError):
        return None


_ONE_HOLDER = _holders(torch.empty(1))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner product in float32; of tensors laid out alike in memory without a temporary."""
    if a.dtype == b.dtype == torch.float32 and a.stride() == b.stride() and _is_dense(a):
        flat = (a.numel(),), (1,)
        return torch.dot(a.as_strided(*flat), b.as_strided(*flat))
    return (a * b).sum(dtype=torch.float32)


def _is_dense(a: Tensor) -> bool:
    return a.is_contiguous() or (a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last))
