"""Which training images keep their labels, where only a share of them may be used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import LabelsError


def label_split(
    labels: Sequence[int],
    fraction: float,
    seed: int,
    *,
    stratified: bool = True,
    classes: Sequence[str] | None = None,
) -> list[int]:
    """The numbers of a random `fraction` of the images, in ascending order.

    stratified: that share of every class, and at least one image of each. Otherwise uniform over all images, as the
    paper's code did; a choice that leaves a class without an image is refused, as nothing could learn that class.
    The seed alone decides; of one seed, the images of a smaller share are among those of a larger one. `classes`, the
    names of the numbers, are for what an error says.
    """
    if not 0 < fraction <= 1:
        raise LabelsError("the share of labels is out of range", expected="a share above 0, at most 1", found=fraction)
    if not len(labels):
        raise LabelsError("there are no labels to choose from")
    numbers = np.asarray(labels)
    random = np.random.default_rng(seed)
    if stratified:
        members = [np.flatnonzero(numbers == label) for label in np.unique(numbers)]
        chosen = np.concatenate([random.permutation(own)[: _count(fraction, len(own))] for own in members])
    else:
        chosen = random.permutation(len(numbers))[: _count(fraction, len(numbers))]
        if missing := sorted(set(numbers.tolist()) - set(numbers[chosen].tolist())):
            raise _no_image([str(label) if classes is None else classes[label] for label in missing], fraction, seed)
    return [int(number) for number in np.sort(chosen)]


def _count(fraction: float, size: int) -> int:
    return max(1, round(fraction * size))


def _no_image(missing: list[str], fraction: float, seed: int) -> LabelsError:
    return LabelsError(
        f"a share of {fraction:g} of the labels leaves some classes without images",
        expected="at least one image of every class",
        found=f"seed {seed} leaves out {len(missing):,}: {', '.join(missing[:10])}{' ...' if missing[10:] else ''}",
        todo="draw the same share from every class (--stratified), or use a larger share or another seed",
    )
