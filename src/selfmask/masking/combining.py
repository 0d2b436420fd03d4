"""One mask out of several of the same weights: what most of them, all of them or any of them leave on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError, DifferentMasksError
from ..maskfile import Bits, PackedMask, licence_of, sharing
from ..maskfile.norm_codes import rounded
from .config import MaskConfig
from .norms import norm_buffers, saved_statistics

How = Literal["vote", "and", "or"]
_SAME = ("alpha_of", "norm")  # settings that say what a mask does to its base, not how it was learned


def combined(masks: Sequence[PackedMask], how: How, base: nn.Module) -> PackedMask:
    """The mask that several masks of this base come to together.

    A weight is on if it is on in at least half of them (vote; where the votes are equal, it stays on), in all of them
    (and) or in any of them (or). Its statistics are the means of theirs; whoever has images may take them anew. What
    belongs to one of them alone stays behind: heads, notes, and a licence that is not that of all.
    """
    if len(masks) < 2:
        raise ConfigError("one mask alone cannot be combined", expected="two masks or more", found=len(masks))
    first = masks[0]
    for number, other in enumerate(masks[1:], 2):
        _check_alike(first, other, number)
    bits = {name: _together([mask.bits[name] for mask in masks], first.sizes[name], how) for name in first.bits}
    licence = licence_of(first.extensions)
    same = all(licence_of(mask.extensions) == licence for mask in masks)
    # Under the rules that count, scores for these bits could not be found: there are as many on as there are.
    config = MaskConfig.from_dict(first.config).changed(rule="threshold")
    return PackedMask(
        bits=bits,
        sizes=first.sizes,
        shapes=first.shapes,
        config=config.to_dict(),
        norm=rounded(_means([mask.norm for mask in masks]), saved_statistics(norm_buffers(base))),
        fingerprint=first.fingerprint,
        base_name=first.base_name,
        preprocessing=first.preprocessing,
        notes=f"{how} of {len(masks)} masks: {', '.join(mask.sha256[:16] for mask in masks)}",
        norm_fingerprint=first.norm_fingerprint,
        base_fingerprint=first.base_fingerprint,
        base_tensors=first.base_tensors,
        tables_fingerprint=first.tables_fingerprint,
        extensions=sharing(licence=licence) if same and licence is not None else {},
        chosen=first.chosen,
    )


def _check_alike(first: PackedMask, other: PackedMask, number: int) -> None:
    """Refuse masks that do not say the same of the same weights."""

    def differ(what: str, expected: object, found: object, todo: str) -> DifferentMasksError:
        what = f"mask 1 and mask {number} {what}, so they cannot be combined"
        return DifferentMasksError(what, expected=expected, found=found, todo=todo)

    if first.sizes != other.sizes or first.fingerprint != other.fingerprint:
        odd = sorted(first.sizes.items() ^ other.sizes.items())
        raise differ(
            "cover different weights",
            f"{len(first.sizes)} tensors, {sum(first.sizes.values()):,} bits",
            f"{len(other.sizes)} tensors, {sum(other.sizes.values()):,} bits; {odd[0][0] if odd else ''} differs",
            "combine masks that were learned with the same --select, --exclude and --fraction, on one backbone",
        )
    if {name: flags.tobytes() for name, flags in first.chosen.items()} != {
        name: flags.tobytes() for name, flags in other.chosen.items()
    }:
        raise differ(
            "cover different fractions of the weights",
            "the same choice of weights",
            "another",
            "combine masks that were learned with the same --fraction, --fraction-by and mask seed",
        )
    ours, theirs = ({name: mask.config.get(name) for name in _SAME} for mask in (first, other))
    if ours != theirs or first.norm_fingerprint != other.norm_fingerprint:
        todo = "combine masks that were learned with the same --norm"
        raise differ("are applied in different ways", ours, theirs, todo)
    if first.preprocessing != other.preprocessing:
        todo = "combine masks that were learned with the same --size"
        raise differ("are for images prepared in different ways", first.preprocessing, other.preprocessing, todo)


def _together(parts: list[Bits], size: int, how: How) -> Bits:
    if how != "vote":
        combine = np.bitwise_and if how == "and" else np.bitwise_or
        together: Bits = combine.reduce(parts)
        return together
    votes = np.zeros(size, np.int32)
    for part in parts:
        votes += np.unpackbits(part, count=size)
    return np.packbits(2 * votes >= len(parts))


def _means(statistics: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of each statistic, in the type that it has."""
    return {
        name: torch.stack([each[name].double() for each in statistics]).mean(0).to(value.dtype)
        for name, value in statistics[0].items()
    }
