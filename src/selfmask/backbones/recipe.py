"""What a backbone's name stands for, before a network is built or a file is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from torch import nn

from ..maskfile import Preprocessing
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
