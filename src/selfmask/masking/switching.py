"""Masks that change places quickly: what it takes to put one in place, and views whose mask can be exchanged.

A mask leaves no weight as it is, because those that are on are divided by alpha. So putting one in place is a pass over
the weights, W / alpha, which is as fast as memory; what the mask itself adds are its weights that are off. Where they
are few, the gaps between them are kept, so that they cost in proportion to their number; else a bit a weight.

Nothing is allocated: fresh pages cost more than all of the arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..maskfile import Bits, PackedMask, unpack_bits
from ..running import as_vectors
from .direct import base_meant
from .effective import Scales, inverse_alpha, unpack_mask_
from .expanding import parts_of
from .norms import norm_buffers, saved_statistics
from .selection import tied_names
from .views import view_of

_FEW = 32  # weights for each that is off, at least, where the gaps between them are kept
MOST_GAP = 65_535
"""What a gap between weights adds at most; where it is that, it goes on in the next."""


@dataclasses.dataclass(frozen=True)
class OffWeights:
    """Which weights of a tensor are off, in the order in which they lie in memory, and 1 / alpha of its parts."""

    scales: Scales
    gaps: npt.NDArray[np.uint16] | None = None
    """What to add to the position of one (or, at first, to 0) for that of the next; 65,535 leads to no weight."""
    bits: Bits | None = None
    """Of all weights, 1 where on, the lowest bit of a byte first: as processors number what they calculate with."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.gaps, self.bits) if part is not None)

    @staticmethod
    def of(on: npt.NDArray[np.bool_], scales: Scales) -> OffWeights:
        """on: flags of all weights, in the order of memory."""
        off = np.flatnonzero(~on)
        if len(off) * _FEW > len(on):
            return OffWeights(scales, bits=np.packbits(on, bitorder="little"))
        steps = np.diff(off, prepend=0)
        more = steps // MOST_GAP
        gaps = np.full(len(off) + int(more.sum()), MOST_GAP, np.uint16)
        gaps[np.cumsum(more + 1) - 1] = steps % MOST_GAP
        return OffWeights(scales, gaps=gaps)

    def write(self, weight: Tensor, out: Tensor) -> None:
        """The effective weight into `out`; both are flat, in the order of memory."""
        if self.bits is not None:
            unpack_mask_(self.bits, None, out, "little")
            for part, own, scale in zip(*_chunks(self.scales, out, weight), self.scales, strict=True):
                torch.addcmul(part.new_zeros(()), own, part, value=scale, out=part)
            return
        for part, own, scale in zip(*_chunks(self.scales, out, weight), self.scales, strict=True):
            # Added to zero, as `apply_mask_` does it: to the bit the same, also where a weight is -0.
            torch.add(part.new_zeros(()), own, alpha=scale, out=part)
        if self.gaps is not None and len(self.gaps):
            positions = np.cumsum(self.gaps, dtype=np.int64)[self.gaps != MOST_GAP]
            out.index_fill_(0, torch.from_numpy(positions).to(out.device), 0)


@dataclasses.dataclass(frozen=True)
class Switch:
    """All that it takes to put a mask in place of another: its weights that are off, and its statistics."""

    off: Mapping[str, OffWeights]
    norm: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Of memory that is its own."""
        return sum(each.nbytes for each in self.off.values()) + sum(value.nbytes for value in self.norm.values())

    @staticmethod
    def of(mask: PackedMask, base: nn.Module) -> Switch:
        """Of a mask that was read for this base."""
        parameters = dict(base.named_parameters(remove_duplicate=False))
        return Switch({name: _off(mask, name, parameters[name]) for name in mask.bits}, dict(mask.norm))


def _off(mask: PackedMask, name: str, weight: Tensor) -> OffWeights:
    on = unpack_bits(mask.bits[name], mask.sizes[name])
    if (flags := mask.chosen.get(name)) is not None:
        chosen, bits = unpack_bits(flags, weight.numel()), on
        on = torch.ones(weight.numel(), dtype=torch.bool)
        on[chosen] = bits
    parts = parts_of(name, weight, mask.config.get("alpha_of"))
    counts = [int(part.sum()) for part in on.chunk(parts)]
    scales = tuple(inverse_alpha(count, weight.numel() // parts) for count in counts)
    like = dense(weight)
    strides = like.stride()
    order = sorted(range(like.ndim), key=lambda dim: (-strides[dim], dim))
    return OffWeights.of(on.view(weight.shape).permute(order).flatten().numpy(), scales)


class SpareView:
    """A view of a base (`views.view_of`) whose mask can be exchanged for another, in the memory that it has.

    To the bit, it is then what `MaskedModel.view` makes of that mask. Only one thread may exchange its mask at a time,
    and nobody may run it meanwhile.

    A view that is `passing` does not hold the weights of its layers: each writes them just before it runs, into memory
    that all share. There they are still in the processor's cache when they are read, so that a pass under another mask
    costs little more than one under the same. This is for masks that come and go; whether a base can be run like that,
    `can_pass` finds out.
    """

    def __init__(self, base: nn.Module, *, passing: bool = False) -> None:
        self._base, self._passing = base, passing
        self._owner: dict[str, str] = {}  # of all names of a masked tensor: the one that speaks for them
        self._own: dict[str, tuple[Tensor, Tensor]] = {}  # the base's weights and ours, flat
        self._masked: set[str] = set()  # those of them that are not as in the base
        self._late: set[str] = set()  # those of them that are written when their layer runs
        self._off: Mapping[str, OffWeights] = {}
        self._renew([])

    @torch.no_grad()
    def put(self, switch: Switch | None) -> None:
        """Put a mask in place, whatever was there; None is the base as it is."""
        off = {} if switch is None else switch.off
        if not self._owner.keys() >= off.keys():
            self._renew([*self._own, *(name for name in off if name not in self._owner)])
        before, self._masked, self._off = self._masked, set(), off
        for name, each in off.items():
            owner = self._owner[name]
            if owner not in self._masked and owner not in self._late:
                each.write(*self._own[owner])
                self._masked.add(owner)
        for name in before - self._masked:
            weight, own = self._own[name]
            own.copy_(weight)
        norm = {} if switch is None else switch.norm
        for name, (value, own) in self._statistics.items():
            own.copy_(norm.get(name, value))

    def _renew(self, names: list[str]) -> None:
        """Give these tensors memory of their own. Masks of the same tensors share it, so that it happens once."""
        with torch.inference_mode(False):
            parameters = {name: each.detach() for name, each in self._base.named_parameters(remove_duplicate=False)}
            tied = tied_names(self._base, names)
            self._late = _weights_of_layers(self._base, tied) if self._passing else set()
            room = torch.full((max((parameters[name].numel() for name in self._late), default=0),), torch.nan)
            blank = {
                name: within(room, dense(parameters[name]))
                if name in self._late
                else torch.empty_like(dense(parameters[name]))
                for name in tied
            }
            self._owner = {alias: name for name, aliases in tied.items() for alias in aliases}
            statistics = saved_statistics(norm_buffers(self._base))
            self.module = view_of(self._base, {alias: blank[name] for alias, name in self._owner.items()}, statistics)
            self._own = {name: (flat(dense(parameters[name])), flat(own)) for name, own in blank.items()}
            buffers = norm_buffers(self.module)
            self._statistics = {name: (value, buffers[name]) for name, value in statistics.items()}
            self._masked = set(self._own) - self._late  # blank memory is not as in the base
            for name in self._late:
                layer = self.module.get_submodule(name.rpartition(".")[0])
                layer.register_forward_pre_hook(lambda _, __, name=name: self._write(name))

    @torch.no_grad()
    def _write(self, name: str) -> None:
        weight, own = self._own[name]
        if (each := self._off.get(name)) is None:
            own.copy_(weight)
        else:
            each.write(weight, own)

    @property
    def nbytes(self) -> int:
        """Of memory that it does not share with the base."""
        stores = [own.untyped_storage() for _, own in (*self._own.values(), *self._statistics.values())]
        return sum({each.data_ptr(): each.nbytes() for each in stores}.values())


@torch.inference_mode()
def can_pass(base: nn.Module, size: tuple[int, int]) -> bool:
    """Whether views of this base may be passing: tried, because a base may use weights without calling their layer."""
    view = SpareView(base, passing=True)
    view._renew([name for name, _ in base.named_parameters(remove_duplicate=False)])
    view.put(None)
    if not view._late:
        return False
    images = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0))
    images = images.contiguous(memory_format=torch.channels_last)
    with base_meant():
        return torch.equal(as_vectors(base(images)), as_vectors(view.module(images)))


def _weights_of_layers(base: nn.Module, tied: Mapping[str, Sequence[str]]) -> set[str]:
    """Those of the tensors that one plain layer has for itself, and on the CPU: elsewhere nothing is gained."""
    found = set()
    for name, aliases in tied.items():
        place, _, own = name.rpartition(".")
        layer = base.get_submodule(place)
        if type(layer) in (nn.Conv2d, nn.Linear) and own == "weight" and len(aliases) == 1:
            weight = layer.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                found.add(name)
    return found


def within(room: Tensor, like: Tensor) -> Tensor:
    """A tensor like this one, at the start of that memory."""
    return room[: like.numel()].as_strided(like.shape, like.stride())


def dense(weight: Tensor) -> Tensor:
    """The weight, if it fills its memory without holes, one row after the other; else a copy that does."""
    strides = weight.stride()
    whole = torch.empty_like(weight).stride() == strides and strides[:1] == (max(strides, default=0),)[: weight.ndim]
    return weight if whole else weight.contiguous()


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor in the order in which it lies in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _chunks(scales: Scales, *tensors: Tensor) -> list[Sequence[Tensor]]:
    return [tensor.chunk(len(scales)) for tensor in tensors]
