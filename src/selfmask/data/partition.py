"""Training and test images of one source, and whether they are apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import BadImageError, EvaluationError, LabelsError
from . import Images, SomeImages, label_split, open_images
from .labels import matched
from .sources import ArrayImages, FileImages

_LEARNED = 0.8  # of each class, where the source is not divided


class Split(NamedTuple):
    """Images to learn from, images to test with, and whether the source itself was divided so."""

    train: Images
    test: Images
    divided: bool


def open_split(data: str) -> Split:
    """Training and test images. What is not divided is: a fifth of each class, always the same, is to test with.

    Files that are in both are refused: what was learned by heart tells nothing.
    """
    train, test = open_images(data, split="train"), open_images(data, split="test")
    if _same(train, test):
        return Split(*_divided(train), divided=False)
    if isinstance(train, FileImages) and isinstance(test, FileImages):
        both = {os.path.realpath(file) for file in train.files} & {os.path.realpath(file) for file in test.files}
        if both:
            raise EvaluationError(
                f"{len(both):,} images are both training and test images",
                found=", ".join(sorted(both)[:3]),
                todo="remove them, or the links to them, from one of the two",
            )
    return Split(train, test, divided=True)


def _divided(images: Images) -> tuple[Images, Images]:
    """By labels alone, and before anything is read, so that every command divides the same source alike."""
    learned = label_split(matched(images, images).train, _LEARNED, seed=0)
    tested = sorted({*range(len(images))} - {*learned})
    if not tested:
        raise LabelsError("no images are left for testing", expected="more images of each class", found=len(images))
    return SomeImages(images, learned), SomeImages(images, tested)


def _same(train: Images, test: Images) -> bool:
    """Whether both are all of one undivided source."""
    if isinstance(train, FileImages) and isinstance(test, FileImages):
        return train.files == test.files
    if (train.names, train.labels) != (test.names, test.labels):
        return False
    if isinstance(train, ArrayImages) and isinstance(test, ArrayImages):
        return np.array_equal(train.pixels, test.pixels)
    for number in (0, len(train) // 2, len(train) - 1):  # all would take as long as to embed them
        try:
            if not train[number].equal(test[number]):
                return False
        except BadImageError:
            continue  # bad in both, or we shall see at another
    return True


def open_labelled(data: str | Path) -> tuple[Images, Images]:
    """Open labelled images as a training and a test set. Classes are matched by name and numbered alike in both.

    If the source has no train and test splits, a fixed fifth of each class is held out for testing.
    """
    train, test, _ = open_split(str(data))
    both = matched(train, test)
    return _named(train, both.train, both.classes), _named(test, both.test, both.classes)


def _named(images: Images, labels: Sequence[int], classes: list[str]) -> Images:
    some = SomeImages(images, range(len(images)))
    some.labels, some.classes = list(labels), classes
    return some
