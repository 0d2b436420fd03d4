"""Which images keep their labels."""

import random

import numpy as np
import pytest
import torch

from selfmask.data import open_images
from selfmask.data.splits import label_split
from selfmask.errors import LabelsError

LABELS = [0] * 400 + [1] * 200 + [2] * 3


@pytest.mark.parametrize("stratified", [True, False])
def test_the_seed_alone_decides(stratified: bool) -> None:
    labels = LABELS[:600]
    first = label_split(labels, 0.5, 7, stratified=stratified)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(123)
    assert label_split(labels, 0.5, 7, stratified=stratified) == first
    assert label_split(labels, 0.5, 8, stratified=stratified) != first
    assert first == sorted(set(first))


def test_it_draws_nothing_from_others() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    label_split(LABELS, 0.5, 7)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


@pytest.mark.parametrize(("fraction", "counts"), [(0.01, [4, 2, 1]), (0.5, [200, 100, 2]), (1.0, [400, 200, 3])])
def test_stratified_takes_a_share_of_every_class_and_at_least_one(fraction: float, counts: list[int]) -> None:
    for seed in range(5):
        chosen = label_split(LABELS, fraction, seed)
        assert np.bincount(np.array(LABELS)[chosen]).tolist() == counts


def test_every_class_of_real_labels_is_there_however_small_the_share() -> None:
    labels = open_images("selfmask/fashion").labels
    assert labels is not None
    for seed in range(5):
        assert sorted(labels[i] for i in label_split(labels, 1e-6, seed)) == list(range(10))


def test_uniform_is_uniform_over_images() -> None:
    counts = np.zeros(30)
    for seed in range(600):
        counts[label_split([0] * 30, 0.5, seed, stratified=False)] += 1
    assert counts.sum() == 600 * 15
    assert abs(counts - 300).max() < 5 * np.sqrt(600 / 4)


def test_of_one_seed_a_smaller_share_lies_in_a_larger() -> None:
    for stratified in (True, False):
        parts = [set(label_split(LABELS[:600], share, 3, stratified=stratified)) for share in (0.1, 0.3, 0.7, 1.0)]
        assert parts[0] < parts[1] < parts[2] < parts[3]


def test_a_uniform_choice_that_leaves_a_class_empty_is_refused_by_name() -> None:
    with pytest.raises(LabelsError, match="without images") as caught:
        label_split(LABELS, 0.01, 0, stratified=False, classes=["cat", "dog", "emu"])
    assert "emu" in str(caught.value.found)
    assert all(word in str(caught.value.todo) for word in ("--stratified", "larger share", "another seed"))
    with pytest.raises(LabelsError, match="leaves out 1: 2"):
        label_split(LABELS, 0.01, 0, stratified=False)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan"), float("inf")])
def test_no_such_share(fraction: float) -> None:
    with pytest.raises(LabelsError, match="share"):
        label_split(LABELS, fraction, 0)


def test_no_labels() -> None:
    with pytest.raises(LabelsError, match="no labels"):
        label_split([], 0.5, 0)
