"""How small a mask is, or weights are: as they are, by general compressors, and by our own coding of masks."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import lzma
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module

from torch import Tensor

from . import codecs
from .fingerprint import as_bytes
from .mask import PackedMask, weights_with_bits

COMPRESSORS = ("gzip", "bz2", "lzma", "lz4", "snappy")
"""Those of the paper."""
PAPER_BITS = 2
"""Bits a weight that the paper's reductions of masks are fractions of; one bit is what an honest mask has."""
_EXTRAS = {"lz4": "lz4.frame", "snappy": "snappy"}  # packages that not everybody has


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes of one thing.

    values: how many weights it is of. plain: bytes as it is: one bit a weight of a mask, whole numbers of weights.
    by: bytes after each compressor that is installed. coded: bytes of a mask in our own coding; None for weights.
    """

    values: int
    plain: int
    by: dict[str, int]
    coded: int | None = None

    @property
    def is_mask(self) -> bool:
        return self.coded is not None

    @property
    def paper_plain(self) -> int:
        """What the paper compares with."""
        return -(-PAPER_BITS * self.values // 8) if self.is_mask else self.plain

    @property
    def smallest(self) -> int:
        """By the best of the general compressors."""
        return min(self.by.values())


def compressors() -> dict[str, Callable[[bytes], bytes]]:
    """Those of the paper that are installed."""
    found: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress,
        "bz2": bz2.compress,
        "lzma": lzma.compress,
    }
    for name, module in _EXTRAS.items():
        try:
            found[name] = import_module(module).compress
        except ImportError:
            continue
    return found


def missing() -> list[str]:
    """Those of the paper that are not installed."""
    return [name for name in COMPRESSORS if name not in compressors()]


def sizes_of_mask(mask: PackedMask, parameters: Mapping[str, Tensor]) -> Sizes:
    """Of the bits alone, without statistics and head. parameters: those of the base, which our coding looks at."""
    weights = weights_with_bits(parameters, mask.sizes, mask.chosen)
    data = b"".join(bits.tobytes() for bits in mask.bits.values())
    coded = coded_bytes(codecs.encode(mask.bits, mask.sizes, weights))
    return Sizes(sum(mask.sizes.values()), len(data), _compressed(data), coded)


def sizes_of_weights(tensors: Iterable[Tensor]) -> Sizes:
    every = list(tensors)
    data = b"".join(map(as_bytes, every))
    return Sizes(sum(tensor.numel() for tensor in every), len(data), _compressed(data))


def coded_bytes(coded: codecs.Coded) -> int:
    tensors, shared = coded
    return len(shared) + sum(len(payload) for _, payload in tensors.values())


def _compressed(data: bytes) -> dict[str, int]:
    return {name: len(compress(data)) for name, compress in compressors().items()}
