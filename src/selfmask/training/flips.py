"""How many weights changed sides since the last look."""

from __future__ import annotations

import torch
from torch import Tensor

from ..masking import MaskedModel


class FlipCounter:
    """Keeps the mask of the last look, one byte a weight, to compare with."""

    def __init__(self, masked: MaskedModel) -> None:
        self.masked = masked
        self._last = dict(self._masks())

    def count(self) -> tuple[float, int]:
        """The share of active weights, and how many flipped since the last call."""
        active = flips = total = 0
        for name, mask in self._masks():
            active += int(mask.count_nonzero())
            flips += int((mask != self._last[name]).count_nonzero())
            total += mask.numel()
            self._last[name] = mask
        return active / total, flips

    def _masks(self) -> list[tuple[str, Tensor]]:
        with torch.no_grad():
            return [(name, mask.bool()) for name, mask in self.masked.masks()]
