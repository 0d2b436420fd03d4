"""Masks to bytes and back. `docs/format.md` specifies every codec to the bit.

raw    one bit a weight.
rice   an entropy coder that models the mask. The gradient of a score carries a factor w, so large weights flip
       first; whoever decodes holds the base, so |w| is free side information. Weights are put in at most four
       classes by |w|, and in each class the gaps between the rarer symbol are Golomb-Rice coded.
lzma   for patterns the model does not know (blocks, rows): all tensors that choose it share one stream.

Why our own Rice coder and not a range coder: it is within 6 % of one (`make bench`), decodes with whole-array
operations (a range coder walks through every weight), and fits on one page of a specification.
"""

from __future__ import annotations

import lzma
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..errors import CorruptMaskFileError
from .mask import Bits

RAW, RICE, LZMA = "raw", "rice", "lzma"
CODECS = (RAW, RICE, LZMA)

_MAX_BORDERS = 3
_BORDERS_BY = 7  # where other side information than |w| is at hand, which tells more
_LARGE = 1 << 23  # in masks of more weights, time to decode counts as well as bytes:
_SCAN_BITS = 0.007  # a border must then save so many bits for each weight that it makes a decoder look at
_BINS = 32  # candidate class borders are quantiles of |w|
_HEADER_BITS = 40  # what one more class costs: border, parameter and number of rare symbols
_ON_IS_RARE = 0x80  # added to the number of borders
_MAX_K = 30
_CHUNK = 1 << 18


def encode(bits: Mapping[str, Bits], sizes: Mapping[str, int], weights: Mapping[str, Tensor]) -> Coded:
    """Code each tensor in the smallest way: a codec and its bytes for each, and the stream that lzma ones share.

    `weights` are the flat base weights that carry the bits; where they are missing, less can be saved. The result
    is never larger than lzma over everything, to a few bytes.
    """
    data = {name: bits[name].tobytes() for name in sorted(bits)}
    scan_bits = _SCAN_BITS if sum(sizes.values()) > _LARGE else 0.0
    with ThreadPoolExecutor(1) as pool:  # lzma is slow, and lets go of the interpreter lock
        everything = pool.submit(compressed, b"".join(data.values()))
        rice = {name: _rice(bits[name], sizes[name], weights.get(name), scan_bits) for name in data}
        alone = {name: min((RAW, raw), (RICE, rice[name]), key=_length) for name, raw in data.items()}
        shared = everything.result()
    total = sum(map(_length, alone.values()))
    if len(shared) > 1.1 * total:  # learned masks end here: no stream could save what it costs
        return alone, b""
    plans: list[Coded] = [(alone, b""), (dict.fromkeys(data, (LZMA, b"")), shared)]
    if group := {name for name, raw in data.items() if len(compressed(raw)) < _length(alone[name])}:
        mixed = {name: (LZMA, b"") if name in group else coded for name, coded in alone.items()}
        plans.append((mixed, compressed(b"".join(data[name] for name in data if name in group))))
    return min(plans, key=lambda plan: len(plan[1]) + sum(map(_length, plan[0].values())))


def decode(
    coded: Coded,
    sizes: Mapping[str, int],
    weights: Mapping[str, Tensor],
    members: Members | None = None,
    known: Mapping[str, str] | None = None,
) -> dict[str, Bits]:
    """The inverse of `encode`; anything that `encode` could not have written is refused.

    `members` keeps what all masks of a base have in common, for the weights whose hash is `known`.
    """
    members, known = members or Members(), known or {}
    tensors, stream = coded
    shared = [name for name in sorted(tensors) if tensors[name][0] == LZMA]
    unshared = _unlzma(stream, [-(-sizes[name] // 8) for name in shared])
    bits = dict(zip(shared, unshared, strict=True))
    for name, (codec, payload) in tensors.items():
        if codec == RICE:  # one after the other: threads fight over the interpreter and over fresh memory
            bits[name] = _unrice(payload, sizes[name], partial(members.of, known.get(name), weights[name]))
        elif codec == RAW:
            bits[name] = np.frombuffer(payload, np.uint8).copy()  # a copy can be written to
        elif codec == LZMA and payload:
            raise CorruptMaskFileError(
                "a mask in the shared stream also has bytes of its own", found=f"{len(payload)} for {name}"
            )
    for name, packed in bits.items():
        check_packed(packed, sizes[name])
    return bits


def encode_by(packed: Bits, n: int, side: Tensor | None) -> bytes:
    """One tensor by the codec rice, with classes of any side information that a decoder has: larger is rarer."""
    return _rice(packed, n, side, 0.0, _BORDERS_BY)


def decode_by(payload: bytes, n: int, side: Tensor) -> Bits:
    """The inverse of `encode_by`."""
    packed = _unrice(payload, n, partial(_class_members, side), _BORDERS_BY)
    check_packed(packed, n)
    return packed


class Members:
    """Which weights are in which class of size: found once for all masks of a base that have the same borders.

    Borders are quantiles of the base's weights, so most masks of a base share them. At most `room` bytes are kept.
    """

    def __init__(self, room: int = 64 << 20) -> None:
        self._room, self._used, self._kept = room, 0, OrderedDict[tuple[str, bytes], list[Positions]]()
        self._lock = Lock()

    def of(self, key: str | None, weight: Tensor, borders: Borders) -> list[Positions]:
        """The members of each class but the last; `key` is a hash of the weight, None for one not to be kept."""
        if key is None:
            return _class_members(weight, borders)
        place = key, borders.tobytes()
        with self._lock:
            if place in self._kept:
                self._kept.move_to_end(place)
                return self._kept[place]
        found = _class_members(weight, borders)
        with self._lock:
            if place not in self._kept:  # another thread may have been as fast
                self._kept[place] = found
                self._used += _size(found)
            while self._used > self._room:
                self._used -= _size(self._kept.popitem(last=False)[1])
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._room,)  # copies find their own


def _size(parts: list[Positions]) -> int:
    return sum(part.nbytes for part in parts)


Coded = tuple[dict[str, tuple[str, bytes]], bytes]
Flags = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.integer[Any]]
Borders = npt.NDArray[np.float32]


def _length(coded: tuple[str, bytes]) -> int:
    return len(coded[1])


def check_packed(packed: Bits, n: int) -> None:
    if packed.size != -(-n // 8):
        raise CorruptMaskFileError("a mask has the wrong length", expected=-(-n // 8), found=packed.size)
    if n % 8 and packed[-1] & (0xFF >> n % 8):
        raise CorruptMaskFileError("a mask has bits after its last weight")


# ---- rice -------------------------------------------------------------------------------------------------------


def _rice(packed: Bits, n: int, weight: Tensor | None, scan_bits: float, most: int = _MAX_BORDERS) -> bytes:
    """Header, then for each class its remainders in bit planes, then the quotients of all classes in unary."""
    on = np.unpackbits(packed, count=n).astype(bool)
    on_is_rare = 2 * int(np.count_nonzero(on)) < n
    is_rare = on == on_is_rare
    borders = np.empty(0, np.float32) if weight is None else _choose_borders(is_rare, weight, scan_bits, most)
    header = [bytes([len(borders) | (_ON_IS_RARE if on_is_rare else 0)]), _upper_half(borders).tobytes()]
    remainders: list[bytes] = []
    quotients: list[Positions] = []
    for rare in _rare_in_classes(is_rare, weight, borders):
        gaps = np.diff(rare, prepend=-1) - 1
        k = _best_k(gaps)
        header.append(bytes([k]) + varint(rare.size))
        remainders += [np.packbits((gaps >> bit & 1).astype(bool)).tobytes() for bit in range(k)]
        quotients.append(gaps >> k)
    ends = np.cumsum(np.concatenate(quotients) + 1) - 1
    unary = np.zeros(int(ends[-1]) + 1 if ends.size else 0, bool)
    unary[ends] = True
    return b"".join([*header, *remainders, np.packbits(unary).tobytes()])


def _unrice(payload: bytes, n: int, members: Callable[[Borders], list[Positions]], most: int = _MAX_BORDERS) -> Bits:
    try:
        return _unrice_checked(memoryview(payload), n, members, most)
    except (ValueError, IndexError) as error:
        raise CorruptMaskFileError("a rice-coded mask is damaged", found=error) from error


def _unrice_checked(payload: memoryview, n: int, members: Callable[[Borders], list[Positions]], most: int) -> Bits:
    number, on_is_rare = payload[0] & ~_ON_IS_RARE, bool(payload[0] & _ON_IS_RARE)
    if number > most:
        raise ValueError(f"{number} class borders where at most {most} are allowed")
    at = 1 + 2 * number
    borders = (np.frombuffer(payload[1:at], "<u2").astype(np.uint32) << 16).view(np.float32)
    if borders.size != number or not np.all(np.isfinite(borders)) or not np.all(borders[1:] < borders[:-1]):
        raise ValueError("class borders do not decrease")
    classes: list[tuple[int, int]] = []
    for _ in range(number + 1):
        k = payload[at]
        count, at = unvarint(payload, at + 1)
        if k > _MAX_K or count > n:
            raise ValueError(f"a class of parameter {k} with {count} of {n} weights")
        classes.append((k, count))

    narrow: type[np.signedinteger[Any]] = np.int32 if n < 2**31 else np.int64  # half the traffic where it suffices
    remainders: list[Positions] = []
    for k, count in classes:
        remainder = np.zeros(count, narrow)
        for bit in range(k):
            plane = np.frombuffer(payload[at : at + -(-count // 8)], np.uint8)
            remainder += np.left_shift(np.unpackbits(plane, count=count), bit, dtype=narrow)
            at += plane.size
        remainders.append(remainder)
    unary = np.unpackbits(np.frombuffer(payload[at:], np.uint8)).view(bool)
    ends = np.flatnonzero(unary)
    total = sum(count for _, count in classes)
    if ends.size != total or unary.size - (int(ends[-1]) + 1 if total else 0) >= 8:
        raise ValueError(f"{ends.size} codes where {total} were announced, or bytes left over")
    quotients = np.diff(ends, prepend=-1).astype(narrow)
    quotients -= 1
    rare: list[Positions] = []
    for (k, count), gaps in zip(classes, remainders, strict=True):
        quotient, quotients = quotients[:count], quotients[count:]
        if count and int(quotient.max()) << k > n:
            raise ValueError("a gap larger than the tensor")
        quotient <<= k
        gaps += quotient
        gaps += 1
        rare.append(np.cumsum(gaps, dtype=np.int64) - 1)
    flags = np.full(n, not on_is_rare)
    flags[rare[-1]] = on_is_rare
    for positions, within in zip(members(borders), rare[:-1], strict=True):
        flags[positions[within]] = on_is_rare
    return np.packbits(flags)


def _rare_in_classes(is_rare: Flags, weight: Tensor | None, borders: Borders) -> list[Positions]:
    """For each class the positions of its rare symbols, counted among its members."""
    last, found = is_rare.copy(), list[Positions]()
    for positions in [] if weight is None else _class_members(weight, borders):
        found.append(np.flatnonzero(is_rare[positions]))
        last[positions] = False
    return [*found, np.flatnonzero(last)]


def _class_members(weight: Tensor, borders: Borders) -> list[Positions]:
    """The positions of the weights in each class but the last.

    Class i, from large |w| to small, has |w| >= borders[i]. The last one takes the rest, but its positions are
    counted among all weights: that costs 0.4 % in bytes and saves a third of the decoding time.
    """
    flat: npt.NDArray[np.float32] = weight.detach().float().cpu().numpy()
    found: list[list[Positions]] = [[] for _ in borders]
    if not borders.size:
        return []
    magnitude = np.empty(min(_CHUNK, flat.size), np.float32)  # used again: fresh pages cost more than arithmetic
    narrow = np.int32 if flat.size < 2**31 else np.int64
    for start in range(0, flat.size, _CHUNK):  # chunks stay in the processor's cache
        part = flat[start : start + _CHUNK]
        large = np.abs(part, out=magnitude[: part.size])
        above = [large >= border for border in borders]
        inside = [above[0], *(now > before for before, now in pairwise(above))]
        for positions, flags in zip(found, inside, strict=True):
            positions.append((np.flatnonzero(flags) + start).astype(narrow))
    return [np.concatenate(positions) for positions in found]


def _choose_borders(is_rare: Flags, weight: Tensor, scan_bits: float, most: int = _MAX_BORDERS) -> Borders:
    """The up to `most` borders of |w|, among its quantiles, that give the least entropy.

    A border must save `scan_bits` for every weight of the tensor, because a decoder looks at each of them.
    """
    rare = np.flatnonzero(is_rare)
    n = is_rare.size
    if not rare.size or n < 2 * _BINS:
        return np.empty(0, np.float32)
    magnitude: npt.NDArray[np.float32] = weight.detach().float().abs().cpu().numpy()
    sample = magnitude[:: max(n // 65536, 1)]
    edges = np.quantile(sample, np.arange(1, _BINS) / _BINS, method="lower").astype(np.float32)
    edges = np.unique((_upper_half(edges).astype(np.uint32) << 16).view(np.float32))
    edges = edges[np.isfinite(edges)]
    # How many weights, and how many rare ones, lie below each edge, and below infinity. Sizes are estimated from
    # the sample: they only steer the choice.
    bins = np.searchsorted(edges, np.concatenate([sample, magnitude[rare]]), side="right")
    below = np.cumsum(np.bincount(bins[: sample.size], minlength=len(edges) + 1)) * (n / sample.size)
    rare_below = np.cumsum(np.bincount(bins[sample.size :], minlength=len(edges) + 1))
    between = _entropy(rare_below[None, :] - rare_below[:, None], below[None, :] - below[:, None])
    between[np.tri(len(below), dtype=bool)] = np.inf  # from the edge of the row up to that of the column
    # least[j]: the fewest bits for what is below edge j, with as many borders as there were rounds.
    least = _entropy(rare_below, np.full(len(below), n))
    chosen: list[list[int]] = [[] for _ in below]
    plans: list[tuple[float, list[int]]] = [(float(least[-1]), [])]
    for number in range(1, most + 1):
        last = np.argmin(least[:, None] + between, axis=0)
        least, chosen = (least[:, None] + between).min(axis=0), [[*chosen[i], int(i)] for i in last]
        plans.append((float(least[-1]) + number * (_HEADER_BITS + scan_bits * n), chosen[-1]))
    return edges[min(plans)[1][::-1]]


def _entropy(rare: npt.ArrayLike, n: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Bits for n symbols of which some are rare."""
    p = np.clip(np.asarray(rare, float) / np.maximum(n, 1), 1e-12, 1 - 1e-12)
    bits: npt.NDArray[np.float64] = np.maximum(n, 0) * (-p * np.log2(p) - (1 - p) * np.log2(1 - p))
    return bits


def _upper_half(values: Borders) -> npt.NDArray[np.uint16]:
    """The upper 16 bits of float32: borders need no more."""
    return (values.view(np.uint32) >> 16).astype("<u2")


def _best_k(gaps: Positions) -> int:
    """The Rice parameter of the shortest code."""
    if not gaps.size:
        return 0
    guess = int(np.log2(gaps.mean() + 1))  # the optimum is close to this for geometric gaps
    candidates = range(max(guess - 2, 0), min(guess + 2, _MAX_K) + 1)
    return min(candidates, key=lambda k: k * gaps.size + int((gaps >> k).sum()))


def varint(value: int) -> bytes:
    """Seven bits a byte, low ones first; the high bit says that more follow."""
    low, high = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(high) if high else bytes([low])


def unvarint(payload: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        value |= (payload[at] & 0x7F) << shift
        at += 1
        if payload[at - 1] < 0x80:
            return value, at
    raise ValueError("a number longer than 35 bits")


# ---- lzma -------------------------------------------------------------------------------------------------------


def compressed(data: bytes, **model: int) -> bytes:
    """A raw LZMA2 stream; `model` are settings of its model of literals, which a decoder finds in the stream."""
    return lzma.compress(data, format=lzma.FORMAT_RAW, filters=_lzma_filters(len(data), **model))


def decompressed(stream: bytes, most: int, what: str) -> bytes:
    """The inverse; never more bytes than the base calls for. `what` is what errors call it."""
    decoder = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=_lzma_filters(most))
    try:
        data = decoder.decompress(stream, max_length=most + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise CorruptMaskFileError(f"{what} is damaged", found=error) from error
    if len(data) > most or not decoder.eof or decoder.unused_data:
        raise CorruptMaskFileError(f"{what} has the wrong length", expected=f"at most {most}", found=len(data))
    return data


def _lzma_filters(size: int, **model: int) -> list[dict[str, int]]:
    """A dictionary no larger than the data could need: the decoder then asks for no more memory either."""
    return [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": min(max(size, 1 << 12), 1 << 23), **model}]


def _unlzma(stream: bytes, lengths: list[int]) -> list[Bits]:
    total = sum(lengths)
    if not total:
        if stream:
            raise CorruptMaskFileError("no mask uses the shared stream", found=f"{len(stream)} bytes")
        return [np.empty(0, np.uint8) for _ in lengths]
    data = decompressed(stream, total, "the shared lzma stream")
    if len(data) != total:
        raise CorruptMaskFileError("the shared lzma stream has the wrong length", expected=total, found=len(data))
    return np.split(np.frombuffer(data, np.uint8).copy(), np.cumsum(lengths)[:-1])
