"""Batch-norm statistics in few bits: steps away from the base's own, which whoever decodes holds.

A mask moves the statistics of a network a little, so how far each moved is all that a file must tell. A variance is
told by its ratio to the base's, on the grid of floats with few bits of fraction; a mean in steps of the standard
deviation that its channel has under the mask, since that is what a norm layer divides by. Where nothing moved, all
codes are 0, and 0 is the base's own number.

Every machine decodes the same bits: the maps use sums, products, quotients and square roots of float64, which IEEE 754
defines to the last bit, and powers of two. Logarithms and exponentials would be the textbook's choice, but their last
bits are up to the library. `docs/format.md` has the formulas.

A file loses nothing: a tensor is coded if its code gives it back to the last bit, and stored as it is otherwise. What
loses a little is `rounded`, which a model is run with and saved with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import CorruptMaskFileError
from .codecs import compressed, decompressed
from .layout import is_statistic

MEAN_BITS, VARIANCE_BITS = 7, 7
"""A mean moves in steps of 2^-7 standard deviations, a ratio of variances has 7 bits of fraction."""
_EPSILON = 2.0**-17  # added to variances, as norm layers do: about their 1e-5
_MOST = 1 << 30  # the largest code; whatever moved further is stored as it is
_PLANES = 4  # bytes of a code at most

Codes = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Statistics = Mapping[str, Tensor]


def rounded(statistics: Statistics, base: Statistics) -> dict[str, Tensor]:
    """The nearest statistics that have a code; a tensor of which none comes near stays as it is. Twice is as once."""
    found: dict[str, Tensor] = {}
    for name in _variances_first(statistics):
        value, near = statistics[name], _near(name, statistics[name], base, found)
        # What a coarse type or a large number rounds away from its code would be another number the next time.
        again = None if near is None else _near(name, near, base, found)
        found[name] = value if near is None or again is None or not torch.equal(near, again) else near
    return {name: found[name] for name in statistics}


def encode(statistics: Statistics, base: Statistics) -> tuple[bytes, set[str]]:
    """The code of all tensors that it gives back to the last bit, and their names; none if that saves nothing."""
    codes = exact_codes(statistics, base)
    if not codes:
        return b"", set()
    payload = stream(np.concatenate(list(codes.values())))
    return (payload, set(codes)) if len(payload) <= most_bytes(statistics, codes) else (b"", set())


def exact_codes(statistics: Statistics, base: Statistics) -> dict[str, Codes]:
    """The codes of all tensors that they give back to the last bit, in order of names."""
    codes: dict[str, Codes] = {}
    for name in sorted(statistics):
        near = _near(name, statistics[name], base, statistics)
        if near is not None and torch.equal(near, statistics[name]):
            codes[name] = _codes(name, statistics[name], base, statistics)
    return codes


def decode(payload: bytes, base: Statistics, stored: Statistics) -> dict[str, Tensor]:
    """All statistics: those that are `stored` as they are, and the others from their code."""
    count = sum(base[name].numel() for name in set(base) - set(stored))
    return statistics_of(unstream(payload, count), base, stored)


def statistics_of(steps: Codes, base: Statistics, stored: Statistics) -> dict[str, Tensor]:
    """All statistics, of which some are `stored`, and these are the codes of the others, in order of names."""
    names = sorted(set(base) - set(stored))
    sizes = [base[name].numel() for name in names]
    codes = dict(zip(names, np.split(steps, np.cumsum(sizes)[:-1]), strict=True))
    found = dict(stored)
    for name in _variances_first(names):
        if _has_partner(name, base):
            found[name] = _decoded(name, codes[name], base, found)
        if not is_statistic(name, found.get(name, torch.tensor(torch.nan))):
            raise CorruptMaskFileError("the file contains batch-norm statistics that no images have", found=name[:200])
    return {name: found[name] for name in base}


def stream(codes: Codes, **model: int) -> bytes:
    """Codes, compressed; `model` is as in `codecs.compressed`."""
    folded = np.where(codes < 0, -2 * codes - 1, 2 * codes).astype("<u4")
    planes = max(1, -(-int(folded.max()).bit_length() // 8)) if folded.size else 1
    # Low bytes first: in a plane of their own, the others are zeros almost everywhere.
    data = folded.view(np.uint8).reshape(-1, _PLANES)[:, :planes].T.tobytes()
    return compressed(data, **{"lc": 0, "lp": 0, "pb": 0, **model})


def unstream(payload: bytes, count: int) -> Codes:
    """The inverse of `stream`, of so many codes."""
    data = np.frombuffer(decompressed(payload, _PLANES * count, "the stream of statistics"), np.uint8)
    if not count or not data.size or data.size % count:
        raise CorruptMaskFileError(
            "the stream of statistics has the wrong length", expected=f"1 to {_PLANES} times {count}", found=data.size
        )
    folded = np.zeros((count, 8), np.uint8)
    folded[:, : data.size // count] = data.reshape(-1, count).T
    every = folded.view("<i8")[:, 0]
    codes: Codes = np.where(every & 1, -(every + 1) // 2, every // 2)
    return codes


def most_bytes(base: Statistics, coded: Iterable[str]) -> int:
    """No code is longer than the numbers it stands for in float32."""
    return sum(4 * base[name].numel() for name in coded)


# ---- one tensor ---------------------------------------------------------------------------------------------------


def _near(name: str, value: Tensor, base: Statistics, now: Statistics) -> Tensor | None:
    """What the code of a tensor stands for; None if it has none."""
    if not _has_partner(name, base):
        return None
    variance = value if _is_variance(name) else now[_partner(name)]
    if not (is_statistic(name, value) and is_statistic(name, base[name]) and is_statistic(_partner(name), variance)):
        return None
    codes = _codes(name, value, base, now)
    return _decoded(name, codes, base, now) if not codes.size or np.abs(codes).max() < _MOST else None


def _codes(name: str, value: Tensor, base: Statistics, now: Statistics) -> Codes:
    """The nearest codes of finite statistics. `now` has the variances under the mask, which means are counted in."""
    new, own = _numbers(value), _numbers(base[name])
    with np.errstate(over="ignore", under="ignore"):
        if _is_variance(name):
            fraction, exponent = np.frexp((new + _EPSILON) / (own + _EPSILON))  # fraction is from 1/2 to 1
            steps = np.rint((2 * fraction - 1) * 2**VARIANCE_BITS) + (exponent - 1.0) * 2**VARIANCE_BITS
        else:
            steps = np.rint((new - own) / _mean_step(now[_partner(name)]))
    codes: Codes = np.clip(steps, -_MOST, _MOST).astype(np.int64)
    return codes


def _decoded(name: str, codes: Codes, base: Statistics, now: Statistics) -> Tensor:
    own = _numbers(base[name])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # what is not finite is refused by who asks
        if _is_variance(name):
            fraction = (codes & (2**VARIANCE_BITS - 1)) / 2**VARIANCE_BITS
            ratio = np.ldexp(1 + fraction, codes >> VARIANCE_BITS)
            new = np.maximum((own + _EPSILON) * ratio - _EPSILON, 0)
        else:
            new = own + codes * _mean_step(now[_partner(name)])
        new = np.where(codes == 0, own, new)
    return _as(base[name], new)


def _mean_step(variance: Tensor) -> Numbers:
    step: Numbers = np.sqrt(_numbers(variance) + _EPSILON) / 2**MEAN_BITS
    return step


def _numbers(value: Tensor) -> Numbers:
    return value.detach().cpu().double().flatten().numpy()


def _as(buffer: Tensor, numbers: Numbers) -> Tensor:
    """Rounded to float32 and then to the type of the base's buffer, where that is another; float64 is kept."""
    value = torch.from_numpy(numbers)
    value = value if buffer.dtype == torch.float64 else value.float()
    return value.to(buffer.device, buffer.dtype).view(buffer.shape)


def _is_variance(name: str) -> bool:
    return name.endswith("running_var")


def _partner(name: str) -> str:
    """The variance that belongs to a mean; to a variance, itself."""
    return name.removesuffix("running_mean") + "running_var" if name.endswith("running_mean") else name


def _has_partner(name: str, base: Statistics) -> bool:
    return _partner(name) in base and base[_partner(name)].shape == base[name].shape


def _variances_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=_is_variance, reverse=True)
