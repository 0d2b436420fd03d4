"""Linear probes reach the optimum of the recipe's objective."""

import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from selfmask.errors import EvaluationError
from selfmask.evaluation import few_label_probe, linear_probe, probe
from selfmask.evaluation.probe import stratified


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load_digits()
    x, y = torch.from_numpy(data.data).float(), torch.from_numpy(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1000], y[:1000], x[1000:], y[1000:]


def oracle_accuracy(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor) -> float:
    """The recipe's objective, mean loss + lambda / 2 |W|^2 with lambda = 0.01 / n, by L-BFGS in float64."""
    x, test_x = F.normalize(x.double(), dim=1), F.normalize(test_x.double(), dim=1)
    weight = torch.zeros(int(y.max()) + 1, x.shape[1], dtype=torch.double, requires_grad=True)
    bias = torch.zeros(len(weight), dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=3000, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(x, weight, bias), y) + 0.01 / len(x) / 2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return float((F.linear(test_x, weight, bias).argmax(1) == test_y).double().mean())


def test_equals_the_recipes_objective(digits: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    found = linear_probe(*digits)
    assert found == pytest.approx(oracle_accuracy(*digits), abs=2.5 / 797)  # two images on the boundary, at most
    assert found > 0.9


def test_few_labels_are_stratified_and_seeded(digits: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, y, test_x, test_y = digits
    mean, each = few_label_probe(x, y, test_x, test_y, fraction=0.03, seeds=3)
    assert few_label_probe(x, y, test_x, test_y, fraction=0.03, seeds=3) == (mean, each)
    assert len(each) == 3
    assert len(set(each)) > 1
    assert mean == pytest.approx(np.mean(each))
    chosen = stratified(y.numpy(), 0.03, seed=1)
    assert each[1] == linear_probe(x[chosen], y[chosen], test_x, test_y)
    assert 0.6 < mean < linear_probe(*digits)


def test_a_share_of_every_class_and_at_least_one() -> None:
    labels = np.array([0] * 400 + [1] * 200 + [2] * 3)
    chosen = stratified(labels, 0.01, seed=0)
    assert np.bincount(labels[chosen]).tolist() == [4, 2, 1]
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert chosen.tolist() != stratified(labels, 0.01, seed=1).tolist()
    assert len(stratified(labels, 1.0, seed=0)) == 603


def test_all_labels_is_the_linear_probe(digits: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    mean, each = few_label_probe(*digits, fraction=1.0, seeds=1)
    assert mean == each[0] == linear_probe(*digits)


def test_quick_on_4000_by_256() -> None:
    y = torch.randint(10, (5000,))
    x = F.relu(torch.randn(10, 256)[y] + 2 * torch.randn(5000, 256) + 1)
    start = time.perf_counter()
    assert linear_probe(x[:4000], y[:4000], x[4000:], y[4000:]) > 0.5
    assert time.perf_counter() - start < 10


def test_no_convergence_is_said(digits: tuple[Tensor, Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_ITERATIONS", 2)
    with pytest.warns(UserWarning, match="did not converge"):
        linear_probe(*digits)


def test_one_class_is_refused() -> None:
    with pytest.raises(EvaluationError, match="two classes"):
        linear_probe(torch.randn(5, 3), [1] * 5, torch.randn(5, 3), [1] * 5)


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(EvaluationError, match="no labels"):
        few_label_probe(torch.randn(4, 3), [0, 1, 0, 1], torch.randn(4, 3), [0, 1, 0, 1], fraction=0.0)
