"""Masks and statistics coded by those that come before them in a pack. `docs/format.md` has it to the bit.

Masks of one base have much in common: what one leaves out, the next is likely to leave out, too. Whoever decodes them
in order knows how many of those before have each weight off, which is side information like the size of the weight
itself, and the codec rice takes it as it takes that. Statistics move in the same directions: each is told by how far it
is from the mean of those before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import CorruptMaskFileError
from .codecs import check_packed, decode_by, encode_by, unvarint, varint
from .mask import Bits

_RAW, _BY_SIZE, _BY_HISTORY, _WAYS = 0, 1, 2, 4
_MOST = 1 << 30  # the largest code of a statistic
Key = tuple[str, int, bytes]
"""Of a tensor: its name, the number of bits, and the flags of the weights that carry them, if not all do."""
Codes = npt.NDArray[np.int64]


class BitHistory:
    """The bits of masks, one after the other."""

    def __init__(self) -> None:
        self._off: dict[Key, npt.NDArray[np.uint32]] = {}

    def encode(self, bits: Mapping[Key, Bits], weights: Mapping[str, Tensor]) -> bytes:
        """The next mask, if it is added: for each tensor, in order of names, how it is coded, its length, its bytes."""
        coded = []
        for key in sorted(bits):
            sides = self._sides(key, weights[key[0]])
            ways = {_RAW: bits[key].tobytes()} | {
                way: encode_by(bits[key], key[1], side) for way, side in sides.items()
            }
            way = min(ways, key=lambda each: len(ways[each]))
            coded += [varint(_WAYS * len(ways[way]) + way), ways[way]]
        return b"".join(coded)

    def decode(self, payload: bytes, keys: Iterable[Key], weights: Mapping[str, Tensor]) -> dict[Key, Bits]:
        """The inverse of `encode`, and adds the mask; what could not have been written is refused."""
        found, at, data = dict[Key, Bits](), 0, memoryview(payload)
        for key in sorted(keys):
            try:
                number, at = unvarint(data, at)
            except (ValueError, IndexError) as error:
                raise CorruptMaskFileError("a mask in the pack is damaged", found=error) from error
            length, way = divmod(number, _WAYS)
            part, at = bytes(data[at : at + length]), at + length
            sides = self._sides(key, weights[key[0]]) if way != _RAW else {}
            if len(part) != length or length > most_bytes(key[1]) or way not in (_RAW, *sides):
                raise CorruptMaskFileError(
                    f"the mask of {key[0][:200]} in the pack is damaged", found=f"{length} bytes, coded by {way}"
                )
            if way == _RAW:
                found[key] = np.frombuffer(part, np.uint8).copy()
                check_packed(found[key], key[1])
            else:
                found[key] = decode_by(part, key[1], sides[way])
        if at != len(data):
            raise CorruptMaskFileError("a mask in the pack is damaged", expected=f"{len(data)} bytes", found=at)
        self.add(found)
        return found

    def _sides(self, key: Key, weight: Tensor) -> dict[int, Tensor]:
        """What is known of each weight, by the way of coding that uses it: its size; how often it was off, and size."""
        size = weight.detach().float().abs().cpu()
        sides = {_BY_SIZE: size}
        if key in self._off:
            largest = float(size.max()) if size.numel() else 0.0
            within = (
                size.numpy() / np.float32(2 * largest) if 0 < largest < np.inf else np.zeros(size.shape, np.float32)
            )
            sides[_BY_HISTORY] = torch.from_numpy(self._off[key].astype(np.float32) + within)
        return sides

    def add(self, bits: Mapping[Key, Bits]) -> None:
        for key, packed in bits.items():
            off = (1 - np.unpackbits(packed, count=key[1])).astype(np.uint32)
            self._off[key] = self._off[key] + off if key in self._off else off


def most_bytes(bits: int) -> int:
    """No mask is coded in more than a bit a weight."""
    return -(-bits // 8)


class CodeHistory:
    """The codes of statistics (`norm_codes.py`), one mask after the other."""

    def __init__(self) -> None:
        self._sum: Codes | None = None
        self._count = 0

    def steps(self, codes: Codes) -> Codes:
        """How far the next codes are from the mean of those before, which is rounded to the nearest, up if in doubt."""
        steps: Codes = codes - self._mean()
        self._add(codes)
        return steps

    def codes(self, steps: Codes) -> Codes:
        """The inverse of `steps`."""
        codes: Codes = steps + self._mean()
        if codes.size and np.abs(codes).max() > _MOST:
            raise CorruptMaskFileError("the statistics in the pack are damaged", found="a step that is too large")
        self._add(codes)
        return codes

    def _mean(self) -> Codes | int:
        return 0 if self._sum is None else (2 * self._sum + self._count) // (2 * self._count)

    def _add(self, codes: Codes) -> None:
        self._sum = codes.copy() if self._sum is None else self._sum + codes
        self._count += 1
