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
            "only one of training and test images has names for its classes",
            expected="names in both, or numbers in both",
            todo="use folders or lists of the same kind for both",
        )
    known = set(names)
    order = train.classes or sorted(known, key=int)
    classes = [name for name in order if name in known]
    if unknown := sorted(set(test_names) - known):
        raise LabelsError(
            f"{len(unknown):,} classes of the test images have no training image, and could never be predicted",
            expected=f"some of {_listed(classes)}",
            found=_listed(unknown),
            todo="add training images of these classes, or leave their test images out; check how names are written",
        )
    _check_several(classes)
    number = {name: i for i, name in enumerate(classes)}
    return Labels(classes, [number[name] for name in names], [number[name] for name in test_names])


def _check_several(classes: Sequence[str]) -> None:
    if len(classes) < 2:
        raise LabelsError(
            "all images are of one class",
            expected="two classes or more",
            found=_listed(classes),
            todo="add images of another class: with one alone, every guess is right",
        )


def check_left(train: set[int], test: set[int], classes: Sequence[str]) -> None:
    """After unreadable images were left out: a class may have lost all its training images."""
    _check_several([classes[number] for number in sorted(train)])
    if lost := [classes[number] for number in sorted(test - train)]:
        raise LabelsError(
            f"no training image of {len(lost):,} classes can be read, so that they could never be predicted",
            found=_listed(lost),
            todo="repair their files, or leave their test images out",
        )


def _names(images: Images, which: str) -> list[str]:
    """The name of each image's class: its number, where classes have no names."""
    if images.labels is None:
        raise LabelsError(
            f"the {which} images have no labels",
            expected="a folder with a sub-folder for each class, a list with labels, or a labelled data set",
            todo="sort some images into folders by class; `selfmask embed` works without labels",
        )
    if images.classes is None:
        return [str(label) for label in images.labels]
    if len(set(images.classes)) < len(images.classes):
        double = sorted({name for name in images.classes if images.classes.count(name) > 1})
        raise LabelsError(f"several classes of the {which} images have one name", found=_listed(double))
    if odd := sorted({label for label in images.labels if not 0 <= label < len(images.classes)}):
        raise LabelsError(
            f"labels of the {which} images that stand for no class",
            expected=f"0 to {len(images.classes) - 1}",
            found=_listed([str(label) for label in odd]),
        )
    return [images.classes[label] for label in images.labels]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
