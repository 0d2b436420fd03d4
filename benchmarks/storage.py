"""Bytes of a mask against general compressors over 1-bit packing, on learned masks and on synthetic patterns."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from itertools import pairwise

import constriction
import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table
from torch import Tensor

from selfmask import MaskedModel
from selfmask.maskfile import codecs, weights_with_bits
from selfmask.maskfile.compressing import coded_bytes, compressors, sizes_of_mask

from .common import Row, timed

Pattern = Callable[[np.random.Generator, tuple[int, ...]], npt.NDArray[np.bool_]]


def learned_rows(masks: dict[str, MaskedModel]) -> tuple[list[Row], Table]:
    """Ours against lzma on learned masks, and a table of bytes for everything else."""
    rows = []
    table = Table(
        "mask", "off", "float32", "1-bit", *compressors(), "ours", title="Bytes of learned masks, norm statistics apart"
    )
    for name, masked in masks.items():
        sizes = sizes_of_mask(masked.pack(), dict(masked.base.named_parameters()))
        coded, other = sizes.coded or 0, sizes.by["lzma"]
        off = f"{1 - masked.sparsity()['total']:.2%}"
        numbers = [4 * masked.num_masked, sizes.plain, *sizes.by.values(), coded]
        table.add_row(name, off, *(f"{number:,}" for number in numbers))
        rows.append(
            Row(f"{name}, {off} off: bytes of the mask / lzma", f"{coded:,}", f"{other:,}", coded / other, 0.85)
        )
    return rows, table


def range_coder_rows(name: str, masked: MaskedModel) -> list[Row]:
    """Why no range coder: the same classes through constriction's. Its time leaves out the grouping, ours has it."""
    packed, weights = masked.pack(), side_information(masked)
    ours = codecs.encode(packed.bits, packed.sizes, weights)
    streams = [stream for key in packed.bits for stream in _classes(packed.bits[key], packed.sizes[key], weights[key])]
    models = [constriction.stream.model.Bernoulli(float(stream.mean()), perfect=False) for stream in streams]
    encoder = constriction.stream.queue.RangeEncoder()
    for stream, model in zip(streams, models, strict=True):
        encoder.encode(stream, model)
    words = encoder.get_compressed()

    def decode() -> None:
        decoder = constriction.stream.queue.RangeDecoder(words)
        for stream, model in zip(streams, models, strict=True):
            decoder.decode(model, len(stream))

    bytes_ = coded_bytes(ours), 4 * len(words)
    label = f"{name}: ours / range coder with the same classes"
    time = timed(f"{label}, decoding", lambda: codecs.decode(ours, packed.sizes, weights), decode, None, repeats=5)
    return [Row(f"{label}, bytes", f"{bytes_[0]:,}", f"{bytes_[1]:,}", bytes_[0] / bytes_[1]), time]


def _classes(packed: codecs.Bits, n: int, weight: Tensor) -> list[npt.NDArray[np.int32]]:
    """The symbols of each magnitude class, for those that have both; the others cost nothing."""
    on = np.unpackbits(packed, count=n)
    borders = codecs._choose_borders(on == (2 * int(on.sum()) < n), weight, 0.0)
    magnitude = weight.abs().numpy()
    edges = [np.inf, *borders, -1]
    groups = [on[(magnitude < high) & (magnitude >= low)] for high, low in pairwise(edges)]
    return [group.astype(np.int32) for group in groups if group.size and 0 < group.mean() < 1]


def synthetic_rows() -> list[Row]:
    """No pattern may come out worse than lzma."""
    rng = np.random.default_rng(0)
    shapes = [(64, 3, 7, 7), (128, 64, 3, 3), (256, 128, 3, 3), (512, 256, 3, 3), (512, 128, 1, 1), (512,)]
    rows = []
    for name, pattern in PATTERNS.items():
        on = {str(i): pattern(rng, shape) for i, shape in enumerate(shapes)}
        bits = {key: np.packbits(value) for key, value in on.items()}
        sizes = {key: value.size for key, value in on.items()}
        weights: dict[str, Tensor] = {key: torch.randn(value.size) for key, value in on.items()}
        coded = coded_bytes(codecs.encode(bits, sizes, weights))
        other = len(lzma.compress(b"".join(packed.tobytes() for packed in bits.values())))
        rows.append(Row(f"pattern {name}: bytes of the mask / lzma", f"{coded:,}", f"{other:,}", coded / other, 1.02))
    return rows


def side_information(masked: MaskedModel) -> dict[str, Tensor]:
    packed = masked.pack()
    return weights_with_bits(dict(masked.base.named_parameters()), packed.sizes, packed.chosen)


def _iid(off: float) -> Pattern:
    return lambda rng, shape: rng.random(shape) >= off


def _per_channel(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    off = rng.beta(0.3, 3, size=(shape[0],) + (1,) * (len(shape) - 1))
    return rng.random(shape) >= off


def _blocky(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Whole kernels and whole output channels are off."""
    outer = rng.random(shape[:2] + (1,) * (len(shape) - 2)) >= 0.1
    rows = rng.random((shape[0],) + (1,) * (len(shape) - 1)) >= 0.1
    return np.broadcast_to(outer & rows, shape).copy()


PATTERNS: dict[str, Pattern] = {
    "iid 1 % off": _iid(0.01),
    "iid 10 % off": _iid(0.10),
    "iid 50 % off": _iid(0.50),
    "iid 90 % off": _iid(0.90),
    "rate varies by channel": _per_channel,
    "blocky": _blocky,
    "all on": _iid(0.0),
}
