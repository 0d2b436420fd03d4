"""`check`: does a mask still help on new images, and how far are these from those it was learned on?"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from .. import checked
from ..data import Images, SomeImages
from ..embedding.embedder import FROZEN, Embedder
from ..embedding.vectors import Progress, embed
from ..errors import BadImageError, EmbedderError, TooFewImagesError
from ..evaluation.drift import Drift, drift_between
from ..files import RunFile
from ..masking import MaskedModel
from ..running import evaluating
from ..training.quality import LEAST, Gain, as_quality, quality_on
from ..training.seeds import generator

LOOKED_AT = 256  # images that the gate looks at
_COMPARED = 1024  # images of each kind that drift is looked for in
_LEAST = 10  # images, of which anything can be said


@dataclasses.dataclass(frozen=True)
class Checked:
    """What became of a mask.

    helps: whether the gate of `adapt`, on new images, finds the mask better than the frozen backbone.
    quality_before, quality_after, gain, gain_error: as in a run; before is the frozen backbone.
    drift: None where there are no old images to compare with.
    seen: how many of the new images the run has learned from; None where nobody knows.
    run_gain, run_gain_error: what the run's own gate found; None where the run does not say.
    """

    images: int
    helps: bool
    quality_before: float
    quality_after: float
    gain: float
    gain_error: float
    drift: Drift | None
    drifted: bool | None
    seen: int | None = None
    run_gain: float | None = None
    run_gain_error: float | None = None


def check(
    embedder: Embedder,
    new: Images,
    old: Images | None = None,
    *,
    seed: int = 0,
    seen: int | None = None,
    run: tuple[float, float] | None = None,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> Checked:
    """Look at new images as the gate of a run would, once; and at old ones, for drift.

    seen, run: for the result, what `seen_by` and `gain_of_run` say.
    """
    masked = embedder.model
    if not isinstance(masked, MaskedModel):
        raise EmbedderError(
            f"{embedder.name} has no mask that could help", expected="a run of `selfmask adapt`, or its mask file"
        )
    images = looked_at(new, LOOKED_AT, seed, "to say whether the mask helps")
    device = next(masked.base.parameters()).device
    with evaluating(masked):
        quality, kinds = quality_on(masked, images, embedder.preprocessing, generator(seed, "held-out copies"), device)
        before, after = quality.frozen(), quality()
    gain = Gain.of(before, after, kinds)
    drift = None if old is None else _drift(embedder, old, new, seed, batch_size, progress)
    return Checked(
        images=len(new),
        helps=gain.proven(1) and as_quality(after) > LEAST,
        quality_before=as_quality(before),
        quality_after=as_quality(after),
        gain=gain.mean,
        gain_error=gain.error,
        drift=drift,
        drifted=None if drift is None else drift.proven(),
        seen=seen,
        run_gain=None if run is None else run[0],
        run_gain_error=None if run is None else run[1],
    )


def gain_of_run(what: str | Path) -> tuple[float, float] | None:
    """Gain and error that the gate of a run found, by its folder or a file in it; None where that is not known."""
    path = Path(what)
    try:
        content = checked.content((path if path.is_dir() else path.parent) / RunFile.RESULT)
        result = checked.mapping(checked.document(content, finite=False))
        return checked.number(result.get("gain")), checked.number(result.get("gain_error"))
    except (OSError, ValueError):
        return None


def _drift(
    embedder: Embedder, old: Images, new: Images, seed: int, batch_size: int, progress: Progress | None
) -> Drift:
    """By the frozen backbone: to a mask, images that it was learned on may look other than those that it was not."""
    module = embedder.module([FROZEN])

    def vectors(images: Images) -> Tensor:
        some = _some(images, _COMPARED, seed)
        return embed(module, some, embedder.preprocessing, batch_size=batch_size, progress=progress)[0]

    return drift_between(vectors(old), vectors(new), seed=seed)


def _some(images: Images, most: int, seed: int) -> Images:
    order = torch.randperm(len(images), generator=generator(seed, "sample of images"))
    return SomeImages(images, sorted(order[:most].tolist()))


def looked_at(images: Images, most: int, seed: int, why: str) -> list[Tensor]:
    """A random sample of images, of which those that can be read, in their order; `why` they must be some."""
    found, sample = [], _some(images, most, seed)
    for number in range(len(sample)):
        try:
            found.append(sample[number])
        except BadImageError:
            continue
    if len(found) < _LEAST:
        raise TooFewImagesError(f"there are too few images {why}", expected=f"at least {_LEAST}", found=len(found))
    return found
