"""Training and test images of one source, and whether they are apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from torch.utils.data import Dataset

from ..errors import BadImageError, ConfigError, EvaluationError, LabelsError, MalformedDataError
from . import Images, SomeImages, open_images
from .images import MAX_PIXELS
from .labels import matched
from .sources import ArrayImages, FileImages, JoinedImages
from .splits import of_each_class

LearnedSplit = Literal["train", "all"]
"""What may be learned from: all but test images, or those, too."""

_LEARNED = 0.8  # of each class, where the source is not divided


class Split(NamedTuple):
    """Images to learn from, images to test with, and whether the source itself was divided so."""

    train: Images
    test: Images
    divided: bool


def open_split(data: str, *, max_pixels: int = MAX_PIXELS) -> Split:
    """Training and test images. What is not divided is: a fifth of each class, always the same, is to test with.

    Files that are in both are refused: what was learned by heart tells nothing.
    """
    train = open_images(data, split="train", max_pixels=max_pixels)
    test = open_images(data, split="test", max_pixels=max_pixels)
    if _same(train, test):
        return Split(*set_apart(train), divided=False)
    if isinstance(train, FileImages) and isinstance(test, FileImages):
        both = {os.path.realpath(file) for file in train.files} & {os.path.realpath(file) for file in test.files}
        if both:
            raise EvaluationError(
                f"{len(both):,} images are both training and test images",
                found=", ".join(sorted(both)[:3]),
                todo="remove them, or the links to them, from one of the two",
            )
    return Split(train, test, divided=True)


def set_apart(images: Images) -> tuple[Images, Images]:
    """By labels alone, and before anything is read, so that every command divides the same source alike."""
    learned = of_each_class(matched(images, images).train, _LEARNED, seed=0)
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


class ToLearn(NamedTuple):
    """Images to learn from without labels, and what the user should know of the choice, in a line; or nothing."""

    images: Images
    note: str


def open_to_learn(
    where: str | Path | Dataset[Any], *, split: LearnedSplit = "train", max_pixels: int = MAX_PIXELS
) -> ToLearn:
    """Images to learn from, which leave out those that `evaluate` and `train` would test with.

    These are the test split or, of labelled images that are not divided, the same fifth of each class. With "all", they
    are learned from, too. Images without labels are used whole, and so are data sets that are given as objects.
    """
    if split not in get_args(LearnedSplit):
        raise ConfigError("unknown split", expected=" or ".join(get_args(LearnedSplit)), found=repr(split))
    images = open_images(where, max_pixels=max_pixels)
    if not isinstance(where, str | Path):
        return ToLearn(images, "")
    if split == "all":
        return ToLearn(images if images.undivided else _joined(where, images), "")
    if not images.undivided:
        left = "the test split is left for testing (--split all would train on it, too)"
        return ToLearn(images, "; ".join(filter(None, [images.note, left])))
    try:
        train, test = set_apart(images)
    except LabelsError:  # there are none, or none that anything could be tested with
        return ToLearn(images, "")
    left = (
        f"{len(test):,} of {len(images):,} labelled images, a fixed fifth of each class, are left for testing "
        "(--split all would train on them, too)"
    )
    return ToLearn(train, "; ".join(filter(None, [left, images.note])))


def _joined(where: str | Path, train: Images) -> Images:
    """All splits that there are."""
    parts = {"train": train}
    for split in ("test", "val"):
        try:
            part = open_images(where, split=split, max_pixels=train.max_pixels)
        except MalformedDataError:  # an array file without it
            continue
        if not any(_same(part, other) for other in parts.values()):
            parts[split] = part
    return JoinedImages(parts)


def open_labelled(data: str | Path, *, max_pixels: int = MAX_PIXELS) -> tuple[Images, Images]:
    """Open labelled images as a training and a test set. Classes are matched by name and numbered alike in both.

    If the source has no train and test splits, a fixed fifth of each class is held out for testing.
    """
    train, test, _ = open_split(str(data), max_pixels=max_pixels)
    both = matched(train, test)
    return _named(train, both.train, both.classes), _named(test, both.test, both.classes)


def open_to_measure(data: str | Path, *, max_pixels: int = MAX_PIXELS) -> tuple[Images, Images | None]:
    """The same, where labels only measure what was learned without them: if there are none to measure with, all images
    are learned from, and there is no test set."""
    try:
        train, test = open_labelled(data, max_pixels=max_pixels)
    except LabelsError:
        return open_to_learn(data, max_pixels=max_pixels).images, None
    return (train, test) if len(set(train.labels or [])) > 1 else (open_to_learn(data).images, None)


def _named(images: Images, labels: Sequence[int], classes: list[str]) -> Images:
    some = SomeImages(images, range(len(images)))
    some.labels, some.classes = list(labels), classes
    return some
