"""Labels of two sources mean the same by name, whatever their numbers."""

import numpy as np
import pytest

from selfmask.data import Images
from selfmask.data.labels import check_left, matched
from selfmask.data.sources import ArrayImages
from selfmask.errors import LabelsError


def images(labels: list[int] | None, classes: list[str] | None = None) -> Images:
    return ArrayImages(np.zeros((len(labels or [0]), 4, 4), np.uint8), labels, classes)


def test_the_same_names_in_another_order() -> None:
    found = matched(images([0, 1, 2, 1], ["ant", "bee", "cat"]), images([0, 1, 2], ["cat", "ant", "bee"]))
    assert (found.classes, found.train, found.test) == (["ant", "bee", "cat"], [0, 1, 2, 1], [2, 0, 1])


def test_names_that_no_training_image_has_are_no_classes() -> None:
    found = matched(images([0, 2], ["ant", "bee", "cat"]), images([1, 1], ["bee", "cat"]))
    assert (found.classes, found.train, found.test) == (["ant", "cat"], [0, 1], [1, 1])


def test_a_class_without_test_images_is_fine() -> None:
    assert matched(images([0, 1], ["ant", "bee"]), images([1], ["ant", "bee"])).test == [1]


def test_numbers_without_names_are_names_in_order_of_size() -> None:
    found = matched(images([10, 9, 10]), images([10]))
    assert (found.classes, found.train, found.test) == (["9", "10"], [1, 0, 1], [1])


def test_classes_that_training_never_had_are_named() -> None:
    with pytest.raises(LabelsError, match="never be predicted") as caught:
        matched(images([0, 1], ["ant", "bee", "cat"]), images([0, 2, 3], ["ant", "bee", "cat", "dog"]))
    assert caught.value.found == "cat, dog"


BAD = {
    "no labels": (images(None), images([0, 1])),
    "no labels ": (images([0, 1]), images(None)),
    "one class": (images([1, 1], ["ant", "bee"]), images([1], ["ant", "bee"])),
    "only one of": (images([0, 1], ["ant", "bee"]), images([0, 1])),
    "have the same name": (images([0, 1], ["ant", "ant"]), images([0, 1], ["ant", "ant"])),
    "do not match any class": (images([0, 1, -1], ["ant", "bee"]), images([0, 1], ["ant", "bee"])),
    "do not match any class ": (images([0, 1], ["ant", "bee"]), images([0, 2], ["ant", "bee"])),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_matched_is_refused(case: str) -> None:
    with pytest.raises(LabelsError, match=case.strip()):
        matched(*BAD[case])


def test_a_class_whose_training_images_were_all_unreadable() -> None:
    check_left({0, 1}, {1}, ["ant", "bee", "cat"])
    with pytest.raises(LabelsError, match="no readable training images") as caught:
        check_left({0, 1}, {1, 2}, ["ant", "bee", "cat"])
    assert caught.value.found == "cat"
    with pytest.raises(LabelsError, match="one class"):
        check_left({1}, {1}, ["ant", "bee", "cat"])
