"""`find`: which of many masks fits some images best, without labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..data import Images
from ..embedding.embedder import FROZEN
from ..embedding.vectors import Progress
from ..errors import MaskFileError
from ..masking import MaskedModel
from ..preprocessing import Preprocessing
from ..shelf import Found
from ..training.quality import Quality, Seen, quality_on
from ..training.racing import Race, race
from ..training.seeds import generator
from .check import LOOKED_AT, looked_at
from .masks import MayUse, base_of, masks_of_one_base

_FIRST = 64  # images of the first round; every round has twice as many as the one before
_CANDIDATE = "candidate"


@dataclasses.dataclass(frozen=True)
class FoundMask:
    """What came of looking for a mask.

    race: how the masks and "frozen", the backbone itself, fared; the best first.
    images: how many there were to look at.
    passes: images that networks were run on, distorted copies counted; all_passes: had nothing been clear before.
    skipped: files that could not be used, and why.
    """

    race: Race
    images: int
    passes: int
    all_passes: int
    skipped: dict[str, str]


def find(
    folder: Path,
    images: Images,
    *,
    most: int = LOOKED_AT,
    seed: int = 0,
    base: str | None = None,
    licence: str | None = None,
    backbone: str | None = None,
    weights: Path | None = None,
    may_use: MayUse | None = None,
    progress: Progress | None = None,
) -> FoundMask:
    """Compare the masks in a folder, and the frozen backbone, on these images.

    most: number of images to look at. base, licence: as in `list_masks`.
    """
    looked = looked_at(images, most, seed, "to say which mask fits them")
    order = torch.randperm(len(looked), generator=generator(seed, "order of rounds")).tolist()
    chosen = masks_of_one_base(folder, base=base, licence=licence)
    model, preprocessing = base_of(chosen, backbone=backbone, weights=weights, may_use=may_use)
    device = next(model.base.parameters()).device
    draws = generator(seed, "held-out copies")
    quality, kinds = quality_on(model, [looked[i] for i in order], preprocessing, draws, device)
    skipped = chosen.skipped | _problems(model, chosen.found, preprocessing)
    files = {name: found.path for name, found in chosen.found.items() if name not in skipped}
    copies, passes = 1 + len(kinds), 0
    total = copies * len(looked) * (1 + len(files))

    def ran(count: int) -> None:
        nonlocal passes
        passes += copies * count
        if progress is not None:
            progress(passes, total)

    runners = {FROZEN: _Runner(model, quality, None, ran)}
    runners |= {name: _Runner(model, quality, file, ran) for name, file in files.items()}
    return FoundMask(race(runners, kinds, _rounds(len(looked)), FROZEN), len(looked), passes, total, skipped)


def _rounds(images: int) -> list[int]:
    """How many images have been looked at after each round."""
    rounds, now = list[int](), _FIRST
    while now < images:
        rounds.append(now)
        now *= 2
    return [*rounds, images]


def _problems(model: MaskedModel, masks: dict[str, Found], preprocessing: Preprocessing) -> dict[str, str]:
    """Of the masks that cannot be compared with the others: why."""
    problems = {FROZEN: "this is the name of the backbone itself"} if FROZEN in masks else {}
    for name, found in masks.items():
        try:
            mask = model.read_mask(found.path)
        except MaskFileError as error:
            problems[name] = error.what
            continue
        if mask.preprocessing not in (None, preprocessing):
            problems[name] = "it is for images that are prepared in another way"
    return problems


class _Runner:
    """A mask, or the frozen backbone, in the race. Its file is read in each round: many masks would fill memory."""

    def __init__(self, model: MaskedModel, quality: Quality, file: Path | None, ran: Callable[[int], None]) -> None:
        self._model, self._quality, self._file, self._ran = model, quality, file, ran
        self._seen: Seen | None = None

    def scores(self, images: int) -> Tensor:
        before = 0 if self._seen is None else len(self._seen.images)
        new = self._new(before, images)
        self._seen = new if self._seen is None else self._seen.and_more(new)
        self._ran(images - before)
        return self._seen.scores()

    def _new(self, start: int, stop: int) -> Seen:
        if self._file is None:
            return self._quality.seen(self._model.frozen, start, stop)
        self._model.load_mask(self._file, _CANDIDATE)
        try:
            with self._model.using(_CANDIDATE):
                return self._quality.seen(self._model, start, stop)
        finally:
            self._model.delete_mask(_CANDIDATE)

    def forget(self) -> None:
        self._seen = None
