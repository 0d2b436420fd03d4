"""What to do with a pile of images, by their vectors: near-duplicates, images unlike the rest, and what to label first.

Duplicates and clusters are looked for among vectors that are centred and half whitened by themselves, as the gate has
them (training/quality.py): without, a few directions that all images share make everything look alike. For outliers,
just these directions tell most, and vectors are taken as they are (docs/verbs.md has what either comes to).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from scipy.sparse import coo_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor

from ..errors import EvaluationError
from .inputs import check_features
from .knn import neighbours_of
from .moments import Moments
from .whitening import scales

SIMILAR = 0.2
"""Share of the usual distance between neighbours there: two images that are nearer are near-duplicates."""
STRANGE = 2.5
"""Robust standard deviations from which on the distance of an image to its neighbours is an outlier's."""
SIDE = 16
"""Of the thumbnails that pixels are compared by."""
_CANDIDATES, _CANDIDATE = 10, 0.6  # neighbours whose pixels are compared, and the cosine from which on they are
_USUAL = 0.8  # quantile of the distances from an image to its neighbours that is usual: some may be duplicates
_DENSE = 0.25  # of what is usual for all images: no place counts as denser, or many copies would hide each other
_NEAR, _FEWEST, _MOST = (
    0.1,
    10,
    100,
)  # share of all images that tell how strange one is, and limits: a few are a cluster
_TYPICAL = 20  # neighbours that tell how typical an image is of its cluster
_DIRECTIONS = 128  # principal ones, at most
_FLOOR = 0.1  # of the mean variance, added to that of each direction
_AT_ONCE = 4096  # vectors
_LEAST = 3


@dataclasses.dataclass(frozen=True)
class Curation:
    """Numbers of images.

    duplicates: groups of near-duplicates, the one to keep first; the largest group first.
    outliers: images unlike all others, the strangest first.
    strangeness: of every image, [n]: by how many robust deviations it is farther from its neighbours than usual.
    to_label: what to label first, in this order: typical images of the largest clusters.
    """

    duplicates: list[list[int]]
    outliers: list[int]
    strangeness: Tensor
    to_label: list[int]

    @property
    def superfluous(self) -> set[int]:
        """All of a group but one."""
        return {number for group in self.duplicates for number in group[1:]}


def curated(
    vectors: Tensor,
    *,
    hashes: Sequence[bytes] = (),
    thumbnails: Tensor | None = None,
    similar: float = SIMILAR,
    strange: float = STRANGE,
    label: int = 20,
    seed: int = 0,
) -> Curation:
    """Of vectors [n, width].

    hashes: of the images' content, where known: the same content is the same image.
    thumbnails: grey, [n, SIDE, SIDE], where known: images whose vectors are near and whose pixels are nearly the same,
    or mirrored, are near-duplicates, too, and those whose pixels are farther apart than usual are not.
    """
    rows = check_features(vectors, "the images")
    if len(rows) < _LEAST:
        raise EvaluationError("there are too few images to compare", expected=f"at least {_LEAST}", found=len(rows))
    places = placed(rows)
    near, numbers = neighbours_of(places, min(_CANDIDATES, len(places) - 1))
    alike = _relative(1 - near, numbers) <= similar
    if thumbnails is not None:
        apart = _relative(_pixel_distances(thumbnails, numbers), numbers)
        alike = (alike & (apart <= 1)) | ((near >= _CANDIDATE) & (apart <= similar))
    groups = _groups(alike, numbers, hashes)
    strangeness = strangeness_of(rows)
    outliers = [i for i in strangeness.argsort(descending=True).tolist() if strangeness[i] > strange]
    left = sorted({*range(len(rows))} - {i for group in groups for i in group[1:]} - {*outliers})
    return Curation(groups, outliers, strangeness, _to_label(places, left or list(range(len(rows))), label, seed))


def placed(vectors: Tensor) -> Tensor:
    """Unit vectors along the principal directions, half whitened."""
    moments = Moments(vectors.shape[1])
    for part in torch.split(vectors, _AT_ONCE):
        moments.add(part)
    count = min(_DIRECTIONS, vectors.shape[1], len(vectors) - 1)
    found = moments.principal(count)
    matrix = found.vectors.double() * scales(found.variances.double(), 0.5, floor=_FLOOR)
    mean, matrix = moments.mean.float(), matrix.float()
    return torch.cat([F.normalize((part.cpu() - mean) @ matrix, dim=1) for part in torch.split(vectors, _AT_ONCE)])


def _pixel_distances(thumbnails: Tensor, numbers: Tensor) -> Tensor:
    """How far the pixels of each image are from those of its neighbours, or of these mirrored: [n, k]."""
    own, mirrored = (_standardised(each) for each in (thumbnails, thumbnails.flip(-1)))
    return torch.stack(
        [1 - torch.maximum((own * own[other]).sum(1), (own * mirrored[other]).sum(1)) for other in numbers.T], 1
    )


def _relative(distances: Tensor, numbers: Tensor) -> Tensor:
    """Distances [n, k] to neighbours, as shares of what is usual around either of the two.

    Trousers are all alike, bags less, and photographs hardly ever: what counts is how much nearer two are than others.
    """
    usual = distances.quantile(_USUAL, dim=1)
    usual = usual.clamp_min(float(_DENSE * usual.median())).clamp_min(1e-6)
    return distances / torch.minimum(usual[:, None], usual[numbers])


def _standardised(thumbnails: Tensor) -> Tensor:
    flat = thumbnails.flatten(1).float()
    return F.normalize(flat - flat.mean(1, keepdim=True), dim=1)


def _groups(alike: Tensor, numbers: Tensor, hashes: Sequence[bytes]) -> list[list[int]]:
    """Images that are linked by being alike; of each group, that with the most links is kept."""
    count = len(alike)
    first, place = alike.nonzero(as_tuple=True)
    pairs = [(first, numbers[first, place])]
    known: dict[bytes, int] = {}
    same = [(i, known.setdefault(each, i)) for i, each in enumerate(hashes)]
    if twins := [(i, j) for i, j in same if i != j]:
        pairs.append(tuple(torch.tensor(side) for side in zip(*twins, strict=True)))  # type: ignore[arg-type]
    a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
    links = coo_array((torch.ones(len(a)).numpy(), (a.numpy(), b.numpy())), shape=(count, count))
    _, belongs = connected_components(links, directed=False)
    members: dict[int, list[int]] = {}
    for number, group in enumerate(belongs.tolist()):
        members.setdefault(group, []).append(number)
    degree = torch.bincount(torch.cat([a, b]), minlength=count)
    groups = [sorted(each, key=lambda i: (-int(degree[i]), i)) for each in members.values() if len(each) > 1]
    return sorted(groups, key=lambda group: (-len(group), group[0]))


def strangeness_of(rows: Tensor) -> Tensor:
    """How far each image is from its neighbours, in robust deviations above the median."""
    around = min(max(_FEWEST, min(_MOST, int(_NEAR * len(rows)))), len(rows) - 1)
    distance = 1 - neighbours_of(rows, around)[0].mean(1)
    middle = distance.median()
    spread = 1.4826 * (distance - middle).abs().median()
    return (distance - middle) / spread.clamp_min(1e-6)


def _to_label(places: Tensor, candidates: list[int], count: int, seed: int) -> list[int]:
    """TypiClust (Hacohen et al. 2022): as many clusters as labels, and of each the image in the densest place."""
    count = min(count, len(candidates))
    if count < 1:
        return []
    rows = places[candidates]
    clusters = MiniBatchKMeans(count, n_init=3, random_state=seed, batch_size=1024).fit_predict(rows.numpy())
    found = []
    for cluster in range(count):
        members = torch.from_numpy(clusters == cluster).nonzero()[:, 0]
        if not len(members):
            continue
        near = min(_TYPICAL, len(members) - 1)
        density = neighbours_of(rows[members], near)[0].mean(1) if near else torch.zeros(1)
        found.append((len(members), candidates[int(members[density.argmax()])]))
    return [number for _, number in sorted(found, key=lambda each: (-each[0], each[1]))]
