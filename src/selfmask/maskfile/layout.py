"""What reader and writer of mask files share."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from .fingerprint import as_bytes
from .mask import Bits

PathLike = str | os.PathLike[str]
SHARED = "lzma"  # the tensor that all masks of codec lzma share
MAX_HEADER = 8 << 20  # a mask of 10,000 tensors needs about 2 MB; the safetensors limit of 100 MB is generous
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def max_head(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """A head may take as many bytes as a float32 copy of the masked weights, so that the base bounds the file."""
    return sum(4 * math.prod(shape) for shape in shapes.values())


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
