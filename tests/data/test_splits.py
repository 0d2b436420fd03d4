"""Which images keep their labels."""

import random

import numpy as np
import pytest
import torch

from selfmask.data import open_images
from selfmask.data.splits import label_split, unseen
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


@pytest.mark.parametrize(("fraction", "counts"), [(0.01, [3, 2, 1]), (0.5, [200, 100, 2]), (1.0, [400, 200, 3])])
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


def test_a_uniform_choice_may_leave_classes_empty_and_tells_which() -> None:
    chosen = label_split(LABELS, 0.01, 0, stratified=False)
    assert (len(chosen), unseen(LABELS, chosen)) == (6, [2])


def test_labels_of_one_class_are_refused() -> None:
    with pytest.raises(LabelsError, match="leaves one class") as caught:
        label_split(LABELS, 0.001, 0, stratified=False)
    assert all(word in str(caught.value.todo) for word in ("--stratified", "larger share", "another seed"))


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize(("percent", "count"), [(0.25, 125), (0.5, 250), (1, 500), (2, 1000), (4, 2000), (10, 5000)])
def test_the_shares_of_the_paper_are_exact_numbers_of_labels(percent: float, count: int, stratified: bool) -> None:
    labels = [number % 100 for number in range(50_000)]  # as many as CIFAR-100 has
    for seed in range(3):
        chosen = label_split(labels, percent / 100, seed, stratified=stratified)
        assert len(chosen) == len(set(chosen)) == count
        of_class = np.bincount(np.array(labels)[chosen], minlength=100)
        if stratified:  # no class has two more than another, and it is chance which has more
            assert of_class.max() - of_class.min() <= 1
    if stratified and count % 100:
        assert label_split(labels, percent / 100, 0) != label_split(labels, percent / 100, 1)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan"), float("inf")])
def test_no_such_share(fraction: float) -> None:
    with pytest.raises(LabelsError, match="share"):
        label_split(LABELS, fraction, 0)


def test_no_labels() -> None:
    with pytest.raises(LabelsError, match="no labels"):
        label_split([], 0.5, 0)
