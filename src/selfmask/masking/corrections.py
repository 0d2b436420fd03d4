"""What is particular to a mask in a forward pass that it shares with others (`mixing.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .norms import norm_buffers
from .switching import OffWeights, Switch, dense, flat

_PLACES = 400  # in which a layer uses each weight: from there on, each mask that has many weights off has it for itself


@dataclasses.dataclass(frozen=True)
class Plan:
    """The layers of a base that images of different masks can run through together."""

    base: nn.Module
    places: Mapping[str, int]
    """By the name of a layer's weight: in how many places of an image it uses each of its values."""
    norms: tuple[str, ...]
    """Layers that normalise by running statistics."""


class Correction(NamedTuple):
    """W_off of a layer by rows: row i has the values from starts[i] to starts[i + 1], in those columns."""

    columns: Tensor
    starts: Tensor
    values: Tensor

    @staticmethod
    def of(off: OffWeights, weight: Tensor) -> Correction:
        """Integers have 32 bits: that is faster, and layers are not that large."""
        positions = off.positions_of()
        begins = np.arange(0, weight.numel() + 1, weight.numel() // len(weight), dtype=np.int32)
        starts = np.searchsorted(positions, begins).astype(np.int32)
        columns = positions - np.repeat(begins[:-1], np.diff(starts))
        values = flat(dense(weight)).index_select(0, torch.from_numpy(positions))
        return Correction(torch.from_numpy(columns), torch.from_numpy(starts), values)

    def times(self, table: Tensor, columns: Tensor | None = None) -> Tensor:
        """W_off @ table. Bags of embeddings are just that, and faster than the sparse matrices of PyTorch.

        columns: in place of its own.
        """
        columns = self.columns if columns is None else columns
        return torch.embedding_bag(table, columns, self.starts, False, 0, False, self.values, True)[0]


@dataclasses.dataclass(frozen=True)
class Corrections:
    """Of one mask, for all layers of a plan."""

    shared: Mapping[str, Correction]
    """Of layers that run on images of all masks, with the base's weights."""
    apart: Mapping[str, OffWeights]
    """Of layers that run on images of this mask, with weights that are written for it."""
    scales: Tensor
    """What outputs are multiplied by: 1 / alpha for all channels of shared layers, and 1 for those of the others."""
    means: Tensor
    variances: Tensor
    """Of all channels of all norms."""

    @property
    def nbytes(self) -> int:
        """Of memory that it does not share with the mask."""
        own = [part for each in self.shared.values() for part in each]
        return sum(part.nbytes for part in (*own, self.scales, self.means, self.variances))

    @staticmethod
    def of(switch: Switch, plan: Plan) -> Corrections:
        weights = {name: plan.base.get_parameter(name).detach() for name in plan.places}
        shared = {name: off for name, off in switch.off.items() if _is_shared(off, weights[name], plan.places[name])}
        scales = [
            torch.tensor(shared[name].scales if name in shared else (1.0,)).repeat_interleave(
                len(weight) // (len(shared[name].scales) if name in shared else 1)
            )
            for name, weight in weights.items()
        ]
        statistics = {**norm_buffers(plan.base), **switch.norm}
        means, variances = (
            torch.cat([statistics[f"{name}.{key}"] for name in plan.norms]) if plan.norms else torch.empty(0)
            for key in ("running_mean", "running_var")
        )
        return Corrections(
            {name: Correction.of(off, weights[name]) for name, off in shared.items()},
            {name: off for name, off in switch.off.items() if name not in shared},
            torch.cat(scales),
            means,
            variances,
        )


def _is_shared(off: OffWeights, weight: Tensor, places: int) -> bool:
    """Whether a correction is faster. The product takes a step for each weight that is off, in each place."""
    few = off.positions is not None and len(off.positions) * len(weight) < weight.numel()
    return off.bits is None and (few or places < _PLACES)


def takes(plan: Plan, switch: Switch) -> bool:
    """Whether images of a mask can share passes: of one that covers nothing but weights of the plan's layers and
    statistics of its norms, and leaves half of the weights of each channel on: what is left of a channel when nearly
    all of it is taken away would be inexact. Where most weights would have to be written, nothing is gained.
    """
    norms = {f"{name}.{key}" for name in plan.norms for key in ("running_mean", "running_var")}
    if not (plan.places.keys() >= switch.off.keys() and norms >= switch.norm.keys()):
        return False
    written = 0
    for name, off in switch.off.items():
        weight = plan.base.get_parameter(name)
        written += weight.numel() if off.bits is not None else 0
        if _is_shared(off, weight, plan.places[name]):
            size = weight.numel() // len(weight)
            counts = np.bincount(off.positions_of() // size, minlength=1)
            if len(weight) % len(off.scales) or 2 * counts.max() > size:
                return False
    return 2 * written <= sum(plan.base.get_parameter(name).numel() for name in plan.places)
