"""What reader and writer of mask files share."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from .fingerprint import as_bytes
from .mask import Bits

PathLike = str | os.PathLike[str]
SHARED = "lzma"  # the tensor that all masks of codec lzma share


def content_hash(manifest: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the manifest, and of each tensor in the order of names: name, type, shape, bytes."""
    total = hashlib.sha256(manifest.encode() + b"\0")
    for name in sorted(tensors):
        tensor = tensors[name]
        kind = str(tensor.dtype).removeprefix("torch.")
        total.update(json.dumps([name, kind, list(tensor.shape)]).encode() + b"\0")
        total.update(as_bytes(tensor))
    return total.hexdigest()


def same_bits(bits: Bits, reference: Bits, n: int) -> Bits:
    """1 where two masks of n bits agree: few changes then look like few weights off. It is its own inverse."""
    return ~(bits ^ reference) & np.packbits(np.ones(n, bool))
