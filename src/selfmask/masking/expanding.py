"""The effective weights of all tensors of a mask: computed once, and shared for as long as nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..maskfile import PackedMask, unpack_bits
from .config import MaskConfig
from .effective import EffectiveWeight, Scales, apply_mask_, count_ones, inverse_alpha, unpack_mask_
from .layers import projections_in
from .rules import write_mask

Weights = Mapping[str, Tensor]
Write = Callable[[Weights, Weights], dict[str, Scales]]
"""Writes the effective weight of every tensor, given first, into the memory given second; returns 1 / alpha of each, or
of each of its equal parts, which lie one below the other."""


class EffectiveWeights:
    """W * M / alpha for every masked tensor, computed only when something changed or a graph was used up."""

    def __init__(self) -> None:
        self.slots: dict[str, EffectiveWeight] = {}
        self._key: object = None

    def forget(self) -> None:
        """Take none of them for current: another mask may come under the same name."""
        self._key = None

    def of(
        self, key: object, weights: Weights, tracked: Mapping[str, Tensor], write: Write, detach_alpha: bool
    ) -> dict[str, Tensor]:
        """Those of these weights. They are current if `key` equals that of the last call.

        tracked: the scores of those that a gradient is wanted for.
        """
        # Taken once: a backward in another thread may take them away at any time.
        kept = {name: self.slots[name].output for name in weights} if key == self._key else {}
        outputs = {
            name: output
            for name, output in kept.items()
            if output is not None and (output.requires_grad or name not in tracked)
        }
        if outputs and len(outputs) == len(weights):
            return outputs
        kept, outputs = {}, {}  # what is held cannot be written over
        with torch.inference_mode(False), torch.no_grad():
            self.slots = {name: self.slots.get(name) or EffectiveWeight() for name in weights}
            blank = {name: self.slots[name].blank(weight) for name, weight in weights.items()}
            inverse = write(weights, blank)
        for name, weight in weights.items():
            outputs[name] = self.slots[name].finish(tracked.get(name), weight, inverse[name], detach_alpha)
        self._key = key
        return outputs


def write_scored(
    scores: Weights, config: MaskConfig, progress: float, chosen: Weights, weights: Weights, blank: Weights
) -> dict[str, Scales]:
    """`Write` the mask that these scores give at this point of training."""
    counts, parts = [], {name: parts_of(name, out, config.alpha_of) for name, out in blank.items()}
    for name, out in blank.items():
        write_mask(scores[name], config, progress, chosen.get(name), out)
        counts += [count_ones(part) for part in out.chunk(parts[name])]
    # One transfer for all counts: on a GPU each would wait for the device.
    number_on = iter(torch.stack(counts).tolist())
    inverse = {}
    for name, out in blank.items():
        size = out.numel() // parts[name]
        inverse[name] = tuple(inverse_alpha(next(number_on), size) for _ in range(parts[name]))
        apply_mask_(out, weights[name], inverse[name])
    return inverse


def write_packed(mask: PackedMask, weights: Weights, blank: Weights) -> dict[str, Scales]:
    """`Write` a loaded mask."""
    inverse: dict[str, Scales] = {}
    for name, out in blank.items():
        weight, flags = weights[name], mask.chosen.get(name)
        chosen = None if flags is None else unpack_bits(flags, weight.numel()).view(weight.shape)
        unpack_mask_(mask.bits[name], chosen, out)
        parts = parts_of(name, out, mask.config.get("alpha_of"))
        if parts == 1:
            on = [mask.active[name] + weight.numel() - mask.sizes[name]]
        else:
            on = torch.stack([count_ones(part) for part in out.chunk(parts)]).tolist()
        inverse[name] = tuple(inverse_alpha(count, weight.numel() // parts) for count in on)
        apply_mask_(out, weight, inverse[name])
    return inverse


def parts_of(name: str, weight: Tensor, alpha_of: str | None) -> int:
    """How many parts of a tensor have an alpha of their own."""
    return projections_in(name, len(weight)) if alpha_of == "projection" else 1
