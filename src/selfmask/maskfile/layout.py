"""What reader and writer of mask files share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from .mask import Bits

MASKS = "masks"  # the tensor that has the coded masks of all tensors, one after the other
SHARED = "lzma"  # the tensor that all masks of codec lzma share
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Of a mask in a pack, or on a server: nothing that a path, an address or a terminal could take for more."""
_LARGEST = 2.0**64  # of a statistic; with larger ones, sums and products of float32 are no numbers any more


def max_head(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """A head may take as many bytes as a float32 copy of the masked weights, so that the base bounds the file."""
    return sum(4 * math.prod(shape) for shape in shapes.values())


def is_statistic(name: str, value: Tensor) -> bool:
    """Whether images could have such means or variances; with any other, all vectors would be no numbers."""
    least = 0.0 if name.endswith("running_var") else -_LARGEST
    return bool(((value >= least) & (value <= _LARGEST)).all())


def same_bits(bits: Bits, reference: Bits, n: int) -> Bits:
    """1 where two masks of n bits agree: few changes then look like few weights off. It is its own inverse."""
    return ~(bits ^ reference) & np.packbits(np.ones(n, bool))
