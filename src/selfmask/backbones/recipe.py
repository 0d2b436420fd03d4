"""What a backbone's name stands for, before a network is built or its weights are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from ..preprocessing import Preprocessing
from .sources import Source
from .weights import StateDict


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make one backbone. Every family of backbones turns its names into these."""

    build: Callable[[], nn.Module]
    """The network with random weights, on torch's default device."""
    preprocessing: Preprocessing
    source: Source | None
    """Where its published weights are; None if nobody published any."""
    load: Callable[[Path], nn.Module]
    """The network with the weights that `source` gives."""
    translate: Callable[[nn.Module], Callable[[StateDict], StateDict] | None] = lambda model: None
    """For this network, what maps the names in other publishers' files to its own."""
    sha256: str | None = None
    """Of the file that its weights must come from, whoever gives it; None if nobody said."""
    licence: str | None = None
    """Of its published weights, as far as their publisher says."""


@dataclasses.dataclass(frozen=True)
class TextTower:
    """The half of a CLIP that reads: its vectors lie in the same space as those of the backbone, the other half."""

    model: nn.Module
    """With random weights; its `logit_scale` is the logarithm of what cosines are multiplied by."""
    tokenize: Callable[[list[str]], Tensor]
    """Texts -> tokens [B, length]; what is too long is cut off."""
    encode: Callable[[Tensor], Tensor]
    """Tokens -> vectors [B, width], by `model`."""
    translate: Callable[[StateDict], StateDict] | None = None
    """What maps the names in other files to those of `model`."""
