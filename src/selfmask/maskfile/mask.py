"""What a mask file holds, in memory: packed bits, statistics, and what is known about them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..preprocessing import Preprocessing
from .extensions import Extension

Bits = npt.NDArray[np.uint8]


@dataclasses.dataclass
class PackedMask:
    """One mask: a bit per weight that carries a score, most significant bit first, padded with zeros."""

    bits: dict[str, Bits]
    sizes: dict[str, int]
    """How many weights of each tensor carry a bit; fewer than its scalars where only a fraction is masked."""
    shapes: dict[str, tuple[int, ...]]
    config: dict[str, Any]
    norm: dict[str, Tensor]
    fingerprint: str
    head: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    base_name: str | None = None
    preprocessing: Preprocessing | None = None
    notes: str = ""
    progress: float = 0.0
    """How far training had come, from 0 to 1: where the progressive rule stands."""
    norm_fingerprint: str | None = None
    """Set where the statistics are the base's own (frozen): they are then checked instead of stored."""
    base_fingerprint: str | None = None
    """Of all that a checkpoint of the base holds; None in masks from files that do not know it."""
    base_tensors: int | None = None
    tables_fingerprint: str | None = None
    extensions: dict[str, Extension] = dataclasses.field(default_factory=dict)
    """Those that this release knows."""
    origin: str | None = None
    """The address of its file on the hub, with the commit, if it came from there."""
    chosen: dict[str, Bits] = dataclasses.field(default_factory=dict)
    """Packed flags of the weights that carry a bit, where not all of a tensor do. Follows from config and base."""

    @cached_property
    def active(self) -> dict[str, int]:
        """How many of the bits of each tensor are on."""
        return {name: int(np.bitwise_count(bits).sum()) for name, bits in self.bits.items()}

    @cached_property
    def sha256(self) -> str:
        """The identity of the mask: of its bits alone, whatever file, codec or notes they come with."""
        total = hashlib.sha256()
        for name in sorted(self.bits):
            total.update(json.dumps([name, self.sizes[name]]).encode() + b"\0")
            total.update(self.bits[name].data)
        return total.hexdigest()

    def bits_apart(self, other: PackedMask) -> int:
        """In how many bits it differs from another mask of the same weights."""
        return sum(int(np.bitwise_count(bits ^ other.bits[name]).sum()) for name, bits in self.bits.items())

    def replaced(self, **changes: Any) -> PackedMask:
        """A copy with some fields changed; None leaves a field as it is."""
        return dataclasses.replace(self, **{key: value for key, value in changes.items() if value is not None})


def pack_bits(mask: Tensor) -> Bits:
    """Eight flags a byte; `mask` is flat, zero for off and anything else for on."""
    return np.packbits(mask.ne(0).cpu().numpy())


def weights_with_bits(
    parameters: Mapping[str, Tensor], sizes: Mapping[str, int], chosen: Mapping[str, Bits]
) -> dict[str, Tensor]:
    """The base weights that carry a bit, flat: what the codecs use as side information."""
    flat = {name: parameters[name].detach().flatten() for name in sizes}
    for name, flags in chosen.items():
        flat[name] = flat[name][unpack_bits(flags, flat[name].numel()).to(flat[name].device)]
    return flat


def unpack_bits(packed: Bits, n: int) -> Tensor:
    """The inverse of `pack_bits`, as a flat bool tensor."""
    return torch.from_numpy(np.unpackbits(packed, count=n).view(bool))
