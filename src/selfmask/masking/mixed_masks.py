"""What masks need to share a pass (`mixing.py`): the layers that they run through, and what is particular to each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from .norms import norm_buffers
from .switching import OffWeights, Switch


class Plan:
    """The layers of a base that images of different masks can run through together."""

    def __init__(self, base: nn.Module, places: Mapping[str, int], norms: tuple[str, ...]) -> None:
        """places: by the name of a layer's weight, in how many places of an image it uses each of its values. norms:
        layers that normalise by running statistics."""
        self.base, self.places, self.norms = base, places, norms
        self.channels = {name: len(base.get_parameter(name)) for name in places}
        statistics = norm_buffers(base)
        self.means, self.variances = (
            {key: statistics[key] for key in (f"{name}.running_{what}" for name in norms)} for what in ("mean", "var")
        )


@dataclasses.dataclass(frozen=True)
class Own:
    """What is particular to a mask in a pass that it shares."""

    off: Mapping[str, OffWeights]
    scales: Tensor
    """1 / alpha for all channels of all layers."""
    means: Tensor
    variances: Tensor
    """Of all channels of all norms."""

    @staticmethod
    def of(switch: Switch, plan: Plan) -> Own:
        scales, rows = list[float](), list[int]()
        for name, channels in plan.channels.items():
            own = switch.off[name].scales if name in switch.off else (1.0,)
            scales += own
            rows += [channels // len(own)] * len(own)
        means, variances = (_joined(switch.norm, base) for base in (plan.means, plan.variances))
        return Own(switch.off, torch.from_numpy(np.repeat(np.array(scales, np.float32), rows)), means, variances)


def _joined(own: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([own.get(name, value) for name, value in base.items()]) if base else torch.empty(0)
