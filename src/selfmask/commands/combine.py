"""`combine`: one mask out of several of the same backbone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..data import Images
from ..data.pixels import fit, normalised
from ..errors import MaskWriteError
from ..files import RunFile, write_atomically
from ..maskfile import PackedMask, licence_of
from ..masking import MaskedModel
from ..masking.combining import How, combined
from ..preprocessing import Preprocessing
from .check import looked_at
from .masks import MayUse, masked_of
from .opening import load_embedder

_IMAGES, _BATCH = 512, 128  # to take statistics from, at most, and at a time


@dataclasses.dataclass(frozen=True)
class Combined:
    """What became of several masks.

    active: the share of weights that are on; actives: of each of the masks.
    images: how many the statistics were taken from; None where they are the means of the masks' own.
    """

    how: How
    masks: list[str]
    actives: list[float]
    active: float
    images: int | None
    licence: str | None
    bytes: int


def combine(
    masks: Sequence[str | Path],
    out: Path,
    *,
    how: How = "vote",
    images: Images | None = None,
    seed: int = 0,
    backbone: str | None = None,
    weights: Path | None = None,
    may_use: MayUse | None = None,
) -> Combined:
    """Combine masks (run folders, or .smn files) and write the result to `out`.

    images: what to take batch-norm statistics from; without, they are the means of the masks' own.
    """
    embedder = load_embedder(masks[0], backbone=backbone, weights=weights, may_use=may_use)
    model = masked_of(embedder)
    parts = [model.pack(), *(model.read_mask(mask_file(each)) for each in masks[1:])]
    mask = combined(parts, how, model.base)
    seen = None
    if images is not None:
        batches = _batches(images, embedder.preprocessing, seed, next(model.base.parameters()).device)
        mask, seen = _recalibrated(model, mask, batches), sum(map(len, batches))
    size = write_atomically(out, model.file_bytes(mask), MaskWriteError)
    return Combined(
        how,
        [str(each) for each in masks],
        list(map(share, parts)),
        share(mask),
        seen,
        licence_of(mask.extensions),
        size,
    )


def mask_file(what: str | Path) -> Path:
    """The file of a mask that is named by its run folder, or by itself."""
    path = Path(what)
    return path / RunFile.MASK if path.is_dir() else path


def share(mask: PackedMask) -> float:
    """The share of weights that are on."""
    bits = sum(mask.sizes.values())
    return sum(mask.active.values()) / bits if bits else 1.0


def _batches(images: Images, preprocessing: Preprocessing, seed: int, device: torch.device) -> list[Tensor]:
    found = looked_at(images, _IMAGES, seed, "to take statistics from")
    pixels = normalised(torch.stack([fit(image, preprocessing) for image in found]), preprocessing)
    return [part.to(device, memory_format=torch.channels_last) for part in torch.split(pixels, _BATCH)]


def _recalibrated(model: MaskedModel, mask: PackedMask, batches: list[Tensor]) -> PackedMask:
    """The mask with statistics as a run on these images would have taken them."""
    again = MaskedModel.from_pretrained(model.base, model.file_bytes(mask), is_trainable=True).eval()
    if again.config.norm == "anchored":
        again.anchor(batches)
    again.recalibrate(batches)
    return mask.replaced(norm=again.pack().norm)
