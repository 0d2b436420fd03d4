"""Which training images keep their labels, where only a share of them may be used."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import LabelsError


def label_split(labels: Sequence[int], fraction: float, seed: int, *, stratified: bool = True) -> list[int]:
    """The numbers of a random `fraction` of the images, in ascending order: round(fraction * n) of n.

    stratified: as near to that share of every class as whole images allow, and at least one image of each (so never
    fewer images than classes). Otherwise uniform over all images, as the paper's code drew them: where labels are few,
    classes may be without any; `unseen` tells which.
    The seed alone decides; of one seed, the images of a smaller share are among those of a larger one.
    """
    if not 0 < fraction <= 1:
        raise LabelsError("the share of labels is out of range", expected="a share above 0, at most 1", found=fraction)
    if not len(labels):
        raise LabelsError("there are no labels to choose from")
    numbers = np.asarray(labels)
    random = np.random.default_rng(seed)
    count = max(1, round(fraction * len(numbers)))
    if stratified:
        members = _by_class(numbers, random)
        # Image k of a class with n images is due when the share reaches (k + 1/2) / n; the first of each class at once.
        # What is due at the same time comes in random order, so that no class is favoured.
        due = np.concatenate([(np.arange(len(own)) + 0.5) / len(own) for own in members])
        due[np.cumsum([0, *map(len, members[:-1])])] = 0
        order = np.concatenate(members)[np.lexsort((random.permutation(len(due)), due))]
        chosen = order[: max(count, len(members))]
    else:
        chosen = random.permutation(len(numbers))[:count]
    if len(set(numbers[chosen].tolist())) < min(2, len(set(numbers.tolist()))):
        raise LabelsError(
            f"a share of {fraction:g} of the labels leaves one class",
            expected="labels of two or more classes",
            found=f"seed {seed} draws {len(chosen):,} of {len(numbers):,} labels",
            todo="draw the same share from every class (--stratified), or use a larger share or another seed",
        )
    return [int(number) for number in np.sort(chosen)]


def of_each_class(labels: Sequence[int], fraction: float, seed: int) -> list[int]:
    """The numbers of a random `fraction` of each class, rounded by itself, and at least one image."""
    members = _by_class(np.asarray(labels), np.random.default_rng(seed))
    return sorted(int(number) for own in members for number in own[: max(1, round(fraction * len(own)))])


def _by_class(numbers: npt.NDArray[np.int_], random: np.random.Generator) -> list[npt.NDArray[np.int_]]:
    """The numbers of the images of each class, in random order."""
    return [random.permutation(np.flatnonzero(numbers == label)) for label in np.unique(numbers)]


def first_by_hash(names: Sequence[str], count: int, seed: int) -> list[int]:
    """The numbers of so many images, in ascending order: those whose names have the smallest hashes.

    So the names alone decide, not their order; and where images are added, one that was not among so many never comes
    in for another.
    """
    key = seed.to_bytes(8, "little")
    hashes = (hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest() for name in names)
    values = np.frombuffer(b"".join(hashes), "<u8")
    return sorted(np.argsort(values, kind="stable")[:count].tolist())


def unseen(labels: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The classes of which no image was chosen: nothing can learn to predict them."""
    return sorted(set(labels) - {labels[number] for number in chosen})
