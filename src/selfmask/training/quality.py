"""Did the representation get better? Measured without labels, on images that training never sees.

A backbone is of use on new images if it finds the images that belong together, however an image happens to be taken.
Which ones belong together nobody says; but the frozen backbone, looking at undistorted images, has an idea of it. So:
of the images that the frozen backbone puts next to an image, how many does the model find from a distorted view of it?
A model that forgets finds fewer of them, one that collapses hardly any; one that has learned to look past what does not
matter finds more. The other half of the quality asks the same of the neighbours that the model itself gives the
undistorted image: where it knows better than the frozen backbone, it may say so. Either half alone misleads: a model
that only forgets is consistent with itself, and one that learned a lot disagrees with the frozen backbone. And where
features lose dimensions, whatever is left is easily consistent: that costs quality, too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..evaluation import nearest
from ..masking import MaskedModel
from ..running import as_vectors, evaluating

NEIGHBOURS = 20
_RANK_LEFT = 0.8  # of the frozen features' effective rank; below, quality falls in proportion
_AT_ONCE = 128  # images in a forward pass
_SAME = 1e-6  # similarities that differ by less are equal
_NOTHING = 1e-4  # of the mean: vectors that differ from it by less hardly differ but by rounding


class Quality:
    """Measures a masked model against its frozen base, on held-out images as they are and a distorted view of each."""

    def __init__(self, masked: MaskedModel, images: Tensor, views: Tensor) -> None:
        self.masked, self._images, self._views = masked, images, views
        self._k = max(1, min(NEIGHBOURS, len(images) // 5))
        with evaluating(masked), masked.disable_mask():
            frozen = self._vectors(images)
        self._neighbours, self._rank = _nearest_of(frozen, self._k), effective_rank(frozen)

    def frozen(self) -> float:
        """What the frozen backbone itself comes to."""
        with self.masked.disable_mask():
            return self()

    def __call__(self) -> float:
        """Between 0 and 1."""
        with evaluating(self.masked):
            images, views = self._vectors(self._images), self._vectors(self._views)
        if not bool(images.isfinite().all() and views.isfinite().all()):
            return 0.0
        frozen, own = (share_found(images, views, of) for of in (self._neighbours, _nearest_of(images, self._k)))
        left = effective_rank(images) / self._rank
        return (frozen + own) / 2 * min(1.0, left / _RANK_LEFT)

    def _vectors(self, pixels: Tensor) -> Tensor:
        with torch.inference_mode():
            parts = [as_vectors(self.masked(part)).float() for part in torch.split(pixels, _AT_ONCE)]
        return torch.cat(parts)


def effective_rank(images: Tensor) -> float:
    """How many dimensions the vectors use: exp of the entropy of the shares of their variance (Roy and Vetterli)."""
    shares = torch.linalg.svdvals(_centred(images, images).double()).square()
    shares = shares / shares.sum().clamp(min=1e-12)
    return float(torch.special.entr(shares).sum().exp())


def _nearest_of(images: Tensor, k: int) -> Tensor:
    vectors = _centred(images, images)
    return nearest(vectors, vectors, k, exclude_self=True)


def share_found(images: Tensor, views: Tensor, neighbours: Tensor) -> float:
    """Of the neighbours [images, k] of each image, the share that are among the k images nearest to its view.

    Images that are equally near share the last places: whoever sees no difference between images finds none of them.
    """
    k = neighbours.shape[1]
    similarity = _centred(views, images) @ _centred(images, images).T
    similarity.fill_diagonal_(-torch.inf)  # the image itself is no neighbour
    difference = similarity - similarity.topk(k).values[:, -1:]
    nearer, last = (difference > _SAME).double(), (difference.abs() <= _SAME).double()
    places = (k - nearer.sum(1, keepdim=True)) / last.sum(1, keepdim=True)
    return float((nearer + places * last).gather(1, neighbours).mean())


def _centred(vectors: Tensor, images: Tensor) -> Tensor:
    """Less the mean of the images, and of length 1: what all have in common tells nothing apart."""
    mean = images.mean(0)
    return F.normalize(vectors - mean, dim=1, eps=max(_NOTHING * float(mean.norm()), 1e-12))
