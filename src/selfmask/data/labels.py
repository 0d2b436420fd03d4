"""Labels of training and test images in one numbering, matched by the names of the classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..errors import LabelsError
from . import Images

_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Labels:
    """Class numbers of the training and the test images; `classes` are the names of those that training images have."""

    classes: list[str]
    train: list[int]
    test: list[int]


def matched(train: Images, test: Images) -> Labels:
    """The same class has the same number in both, whatever its number, or the order of classes, was in each.

    Classes that no training image has could never be predicted: they are refused in test images.
    """
    names, test_names = _names(train, "training"), _names(test, "test")
    if (train.classes is None) != (test.classes is None):
        raise LabelsError(
            "only one of the training and test sets has class names",
            expected="names in both, or numbers in both",
            todo="use the same kind of folder or list for both",
        )
    known = set(names)
    order = train.classes or sorted(known, key=int)
    classes = [name for name in order if name in known]
    if unknown := sorted(set(test_names) - known):
        raise LabelsError(
            f"{len(unknown):,} classes of the test images have no training images, so they can never be predicted",
            expected=f"only {_listed(classes)}",
            found=_listed(unknown),
            todo="add training images of these classes, or remove their test images; check the spelling of the names",
        )
    _check_several(classes)
    number = {name: i for i, name in enumerate(classes)}
    return Labels(classes, [number[name] for name in names], [number[name] for name in test_names])


def _check_several(classes: Sequence[str]) -> None:
    if len(classes) < 2:
        raise LabelsError(
            "all images belong to one class",
            expected="two or more classes",
            found=_listed(classes),
            todo="add images of another class: with only one, every prediction is correct",
        )


def check_left(train: set[int], test: set[int], classes: Sequence[str]) -> None:
    """After unreadable images were left out: a class may have lost all its training images."""
    _check_several([classes[number] for number in sorted(train)])
    if lost := [classes[number] for number in sorted(test - train)]:
        raise LabelsError(
            f"{len(lost):,} classes have no readable training images, so they can never be predicted",
            found=_listed(lost),
            todo="repair their files, or remove their test images",
        )


def _names(images: Images, which: str) -> list[str]:
    """The name of each image's class: its number, where classes have no names."""
    if images.labels is None:
        raise LabelsError(
            f"the {which} images have no labels",
            expected="a folder with a sub-folder for each class, a list with labels, or a labelled data set",
            todo="sort some images into one folder per class, or use `selfmask embed`, which needs no labels",
        )
    if images.classes is None:
        return [str(label) for label in images.labels]
    if len(set(images.classes)) < len(images.classes):
        double = sorted({name for name in images.classes if images.classes.count(name) > 1})
        raise LabelsError(f"several classes of the {which} images have the same name", found=_listed(double))
    if odd := sorted({label for label in images.labels if not 0 <= label < len(images.classes)}):
        raise LabelsError(
            f"the {which} images have labels that do not match any class",
            expected=f"0 to {len(images.classes) - 1}",
            found=_listed([str(label) for label in odd]),
        )
    return [images.classes[label] for label in images.labels]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
