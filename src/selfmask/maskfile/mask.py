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
from torch import Tensor, nn

Bits = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How images must be prepared for the base: a mask learned under one preparation fails under another."""

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str

    @staticmethod
    def of_model(model: nn.Module) -> tuple[str | None, Preprocessing | None]:
        """Name and preprocessing that a timm model carries; (None, None) for other models."""
        known = getattr(model, "pretrained_cfg", None)
        if not isinstance(known, Mapping) or "input_size" not in known:
            return None, None
        architecture, tag = known.get("architecture"), known.get("tag")
        name = f"{architecture}.{tag}" if architecture and tag else architecture
        height, width = known["input_size"][-2:]
        mean, std = tuple(known["mean"]), tuple(known["std"])
        return name, Preprocessing((height, width), mean, std, str(known["interpolation"]))


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
    norm_fingerprint: str | None = None
    """Set where the statistics are the base's own (frozen): they are then checked instead of stored."""

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

    def replaced(self, **changes: Any) -> PackedMask:
        """A copy with some fields changed; None leaves a field as it is."""
        return dataclasses.replace(self, **{key: value for key, value in changes.items() if value is not None})


def pack_bits(mask: Tensor) -> Bits:
    """Eight flags a byte; `mask` is flat, zero for off and anything else for on."""
    return np.packbits(mask.ne(0).cpu().numpy())
