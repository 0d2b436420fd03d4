"""The combination: one vector of the dispatcher's width, made of the dispatcher's and the experts' features.

The features are put side by side, e = [D, E_1 .. E_K], or for the conditional combination e = [D, 0 .. E_r .. 0] with r
the expert that the router chose. The combined vector is  diag(scale) V^T (e - mean)  with V the principal components of
the training images' e, as many as the dispatcher has features. V has (K + 1) F x F numbers, more than the bits of all
masks: they are stored in 8 bits each, in steps of each component's own, and variances are taken after rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..evaluation.moments import Moments
from ..evaluation.whitening import scales
from .config import ScaleName
from .router import check_tensors

CONDITIONAL, UNCONDITIONAL = "conditional", "unconditional"
COMBINATIONS = (CONDITIONAL, UNCONDITIONAL)
"""A cascade has one of each: for the dispatcher and the expert that is chosen, and for all."""
_POWERS: Mapping[ScaleName, float] = {"whiten": 1.0, "none": 0.0, "eigenvalues": 2.0}


@dataclasses.dataclass(frozen=True)
class Combination:
    """A linear map from the features of all networks to the combined vector."""

    codes: Tensor
    """V / steps, rounded: int8, [(experts + 1) * width, width]"""
    steps: Tensor
    """[width]"""
    variances: Tensor
    """Of the training images along the components, [width]; 0 for a direction that none of them takes."""
    centre: Tensor
    """V^T mean, [width]"""
    scale: ScaleName = "whiten"
    blocks: Tensor = dataclasses.field(init=False, repr=False)
    """The map: blocks[0] for the dispatcher's features, blocks[1 + k] for expert k's; [experts + 1, width, width]."""
    offset: Tensor = dataclasses.field(init=False, repr=False)
    """What the mean of e is mapped to: [width]."""

    def __post_init__(self) -> None:
        width, scale = len(self.steps), scales(self.variances.double(), _POWERS[self.scale]).float()
        object.__setattr__(self, "blocks", (self.codes.float() * (self.steps * scale)).view(-1, width, width))
        object.__setattr__(self, "offset", self.centre * scale)

    @staticmethod
    def fit(moments: Moments, width: int, scale: ScaleName = "whiten") -> Combination:
        """From the moments of all training images' e."""
        found = moments.coded(width)
        centre = (moments.mean @ found.vectors).float()
        return Combination(found.codes, found.steps, found.variances, centre, scale)

    def __call__(self, dispatcher: Tensor, experts: Mapping[int, Tensor]) -> Tensor:
        """Combine features [images, width] of the dispatcher and of some experts; the others count as zeros."""
        combined = torch.addmm(-self.offset, dispatcher, self.blocks[0])
        for number, features in experts.items():
            combined.addmm_(features, self.blocks[1 + number])
        return combined

    def to(self, device: torch.device) -> Combination:
        return Combination(**{name: value.to(device) for name, value in self._stored().items()}, scale=self.scale)

    def _stored(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "steps": self.steps, "variances": self.variances, "centre": self.centre}

    # ---- storage ----------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._stored().items()}

    @staticmethod
    def of(tensors: Mapping[str, Tensor], width: int, experts: int) -> Combination:
        """From what was stored, which need not be sound."""
        shapes = {"codes": ((experts + 1) * width, width), **dict.fromkeys(("steps", "variances", "centre"), (width,))}
        check_tensors("combination", tensors, shapes)
        steps, variances, centre = (tensors[name].float() for name in ("steps", "variances", "centre"))
        return Combination(tensors["codes"].to(torch.int8), steps, variances, centre)


def columns_of(blocks: Sequence[int], width: int) -> Tensor:
    """The columns of e that these blocks take."""
    return torch.cat([torch.arange(block * width, (block + 1) * width) for block in blocks])
