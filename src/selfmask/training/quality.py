"""Did the representation get better? Measured without labels, on images that training never sees, with its own error.

A backbone is of use if it tells images apart by what they show, however they happen to be taken, and knows which belong
together. So, when it sees a distorted copy of an image: how sure is it of the image, among all held-out ones, and how
many of those that it takes for the nearest does it find again? Either alone misses true gains: a mask that draws images
of a kind together recognises single ones no better. The distortions are none of the training's, or the training would
be marked by itself. Features are compared half whitened (every direction divided
by the square root of its spread): without, a few directions that all images share decide; fully whitened, directions
that hardly vary count as much as those that matter, and noise passes for knowledge.

What the frozen backbone takes for similar does not enter: a mask that finds better neighbours can pass. Whether it did
is a paired test over images. The measure was chosen among others on logged runs, and has known errors: docs/gate.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from scipy.special import stdtrit  # type: ignore[import-untyped]
from torch import Tensor

from ..data.distortions import DISTORTIONS, distorted
from ..data.pixels import fit, normalised
from ..evaluation.whitening import scales
from ..preprocessing import Preprocessing
from ..running import as_vectors, evaluating
from .beside import Beside

MEASURE = 4  # counts definitions of the scores, and of what a run keeps by them: a run goes on by its own
TEMPERATURE = 0.1  # of the softmax over images
LEAST = 0.03  # below, images are hardly told apart at all: pure noise has 0.007, real images 0.075 and more
_NEIGHBOURS = 5  # images nearest to one
_WEIGHT = 2.0  # of the share of them that is found again, beside a log-probability
MISTAKES = 0.05  # the chance at which a run may take luck for a gain, all its looks together
_POWER = 0.5  # of whitening
_FLOOR = 0.1  # of the mean variance, added to that of each direction before it is divided by
_AT_ONCE = 128  # images in a forward pass
_COPIES = 512  # distorted ones, in all
_NOTHING = 1e-4  # of the mean: vectors that differ from it by less hardly differ but by rounding


class Quality:
    """Measures a model on held-out images, [n, ...], and distorted copies of them, [copies, n, ...]."""

    def __init__(self, model: Beside, images: Tensor, copies: Tensor) -> None:
        self.model, self._images, self._copies = model, images, copies

    def frozen(self) -> Tensor:
        """What the frozen backbone itself comes to."""
        return self._measured(self.model.frozen)

    def __call__(self) -> Tensor:
        """How well each copy [copies, n] is taken for what it is: at most 0."""
        return self._measured(self.model)

    def _measured(self, run: Callable[[Tensor], object]) -> Tensor:
        return self.seen(run).scores()

    def seen(self, run: Callable[[Tensor], object], start: int = 0, stop: int | None = None) -> Seen:
        """The vectors of some of the images, by their numbers, and of their copies."""
        images, copies = self._images[start:stop], self._copies[:, start:stop]
        with evaluating(self.model):
            flat = _vectors(run, copies.flatten(0, 1))
            return Seen(_vectors(run, images), flat.view(*copies.shape[:2], -1))


class Seen(NamedTuple):
    """Vectors of images [n, d], and of copies of them, [copies, n, d]."""

    images: Tensor
    copies: Tensor

    def scores(self) -> Tensor:
        """How well each copy is taken for what it is, among these images."""
        if bool(self.images.isfinite().all() and self.copies.isfinite().all()):
            return scored(self.images, self.copies)
        return scored(torch.zeros_like(self.images), torch.zeros_like(self.copies))  # all alike

    def and_more(self, others: Seen) -> Seen:
        return Seen(torch.cat([self.images, others.images]), torch.cat([self.copies, others.copies], 1))


def quality_on(
    model: Beside, images: Sequence[Tensor], preprocessing: Preprocessing, draws: torch.Generator, device: torch.device
) -> tuple[Quality, Tensor]:
    """The measure on these images (uint8 [3, H, W]), and the kinds of their distorted copies, [copies, n]."""
    clean = torch.stack([fit(image, preprocessing) for image in images]).float() / 255
    copies, kinds = distorted(clean, _copies(len(images)), draws)
    pixels = (normalised(255 * part, preprocessing) for part in (clean, copies.flatten(0, 1)))
    clean, flat = (part.to(device, memory_format=torch.channels_last) for part in pixels)
    return Quality(model, clean, flat.view(*kinds.shape, *clean.shape[1:])), kinds


def _copies(count: int) -> int:
    """How many distorted copies of each image: more of each where they are few, at much the same cost."""
    return max(2, min(len(DISTORTIONS), _COPIES // count))


def _vectors(run: Callable[[Tensor], object], pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        parts = [as_vectors(run(part)).double() for part in torch.split(pixels, _AT_ONCE)]
    return torch.cat(parts).cpu()


def scored(images: Tensor, copies: Tensor) -> Tensor:
    """A score [copies, n] of each image [n, d] and a copy of it, [copies, n, d]: at most 0."""
    own, seen = similarities(images, copies)
    return recognised(seen) - _WEIGHT * (1 - found_again(own, seen))


def recognised(seen: Tensor) -> Tensor:
    """The log-probability [copies, n] of each image given a copy of it: a softmax over all images."""
    return F.log_softmax(seen / TEMPERATURE, dim=-1).diagonal(dim1=-2, dim2=-1)


def found_again(own: Tensor, seen: Tensor) -> Tensor:
    """Of the images nearest to each, the share [copies, n] that is also nearest to a copy of it."""
    count = min(_NEIGHBOURS, len(own) - 1)
    if count < 1:
        return torch.ones(seen.shape[:2], dtype=seen.dtype)
    itself = torch.eye(len(own), dtype=torch.bool)
    wanted, near = (part.masked_fill(itself, -torch.inf).topk(count).indices for part in (own, seen))
    found = torch.zeros(seen.shape, dtype=seen.dtype).scatter_(-1, near, 1.0)
    return found.gather(-1, wanted.expand_as(near)).mean(-1)


def similarities(images: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines of centred, half whitened vectors: of all images [n, n], and of all copies with them, [copies, n, n]."""
    mean = images.mean(0)
    centred, length = images - mean, _NOTHING * mean.norm()
    _, spread, axes = torch.linalg.svd(centred, full_matrices=False)
    variance = spread.square() / len(images)
    scale = scales(variance, _POWER, floor=_FLOOR)

    def placed(vectors: Tensor) -> Tensor:
        known = vectors.norm(dim=-1, keepdim=True) > length
        return F.normalize(torch.where(known, vectors, 0.0) @ axes.mT * scale, dim=-1)

    place = placed(centred)
    return place @ place.mT, placed(copies - mean) @ place.mT


def as_quality(scores: Tensor) -> float:
    """Scores as one number from 0 to 1: the probability of the right image, averaged geometrically, less what lost
    neighbours cost."""
    return math.exp(float(scores.mean()))


@dataclasses.dataclass(frozen=True)
class Gain:
    """How much higher scores are than before, on average, and the standard error of that."""

    mean: float
    error: float
    freedom: int
    """Degrees of freedom of the error."""

    @staticmethod
    def of(before: Tensor, after: Tensor, kinds: Tensor) -> Gain:
        """Paired over images. What a kind of distortion costs all images alike is no error: the kinds are given."""
        change = after - before
        rest = change.clone()
        present = sorted(set(kinds.flatten().tolist()))
        for kind in present:
            rest[kinds == kind] -= change[kinds == kind].mean()
        number, freedom = change.shape[1], max(0, change.shape[1] - len(present))
        error = math.sqrt(float(rest.mean(0).square().sum()) / max(1, freedom) / number)
        return Gain(float(change.mean()), error, freedom)

    def proven(self, looks: int) -> bool:
        """Whether it is above its own error, where a run looks so many times. When in doubt, it is not."""
        if self.freedom < 1 or not math.isfinite(self.mean):
            return False
        return self.mean > float(stdtrit(self.freedom, 1 - MISTAKES / looks)) * self.error
