"""Scores equal their definitions, written out in loops."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from selfmask.errors import LabelsError
from selfmask.evaluation.metrics import interval, score

CLASSES = [f"class {i}" for i in range(8)]


def test_scores_equal_loops() -> None:
    truth = torch.randint(7, (300,))  # class 7 is never the truth
    ranked = torch.stack([torch.randperm(8)[:5] for _ in range(300)])
    found = score(ranked, truth, CLASSES)
    pairs = list(zip(ranked.tolist(), truth.tolist(), strict=True))
    assert found.top1 == pytest.approx(np.mean([row[0] == true for row, true in pairs]))
    assert found.top5 == pytest.approx(np.mean([true in row for row, true in pairs]))
    assert list(found.per_class) == CLASSES[:7]
    for number in range(7):
        own = [row[0] == number for row, true in pairs if true == number]
        assert found.per_class[CLASSES[number]] == pytest.approx(np.mean(own))
    expected = np.zeros((8, 8), int)
    for row, true in pairs:
        expected[true, row[0]] += 1
    assert found.confusion == expected.tolist()


def test_with_five_classes_or_fewer_top5_is_one() -> None:
    ranked = torch.tensor([[0, -1, -1], [0, 1, -1]])
    assert score(ranked, torch.tensor([2, 1]), ["a", "b", "c"]).top5 == 1
    assert score(ranked, torch.tensor([2, 1]), CLASSES).top5 == 0.5  # what got no vote is no hit


@pytest.mark.parametrize("values", [[0.1, 0.4], [0.5, 0.6, 0.55, 0.7, 0.61], [0.3] * 4])
def test_interval_is_students(values: list[float]) -> None:
    mean, half = interval(values)
    assert half is not None
    assert mean == pytest.approx(np.mean(values))
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    assert half == pytest.approx(stats.t.ppf(0.975, len(values) - 1) * error, abs=1e-12)


def test_one_seed_has_no_interval() -> None:
    assert interval([0.25]) == (0.25, None)


@pytest.mark.parametrize(
    ("ranked", "truth"),
    [
        (torch.zeros(3, 5), torch.zeros(2)),
        (torch.zeros(0, 5), torch.zeros(0)),
        (torch.full((2, 5), 8), torch.zeros(2)),
        (torch.zeros(2, 5), torch.full((2,), 8)),
        (torch.full((2, 5), -1), torch.zeros(2)),
        (torch.zeros(2, 5), torch.full((2,), -1)),
    ],
)
def test_what_does_not_fit_is_refused(ranked: torch.Tensor, truth: torch.Tensor) -> None:
    with pytest.raises(LabelsError):
        score(ranked.long(), truth.long(), CLASSES)
