"""Labelled images in two parts, one to learn from and one to test with, whose labels mean the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..data import Images, SomeImages
from ..evaluation.labels import matched
from ..evaluation.parts import open_parts


def open_labelled(data: str | Path) -> tuple[Images, Images]:
    """Images to learn from and images to test with. Classes are matched by name, and numbered alike in both.

    A source that is not divided is: a fifth of each class, always the same, is kept for testing.
    """
    train, test, _ = open_parts(str(data))
    both = matched(train, test)
    return _named(train, both.train, both.classes), _named(test, both.test, both.classes)


def _named(images: Images, labels: Sequence[int], classes: list[str]) -> Images:
    some = SomeImages(images, range(len(images)))
    some.labels, some.classes = list(labels), classes
    return some
