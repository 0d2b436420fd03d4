"""Linear probes reach the optimum of the recipe's objective."""

import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from selfmask.data.splits import label_split
from selfmask.errors import LabelsError
from selfmask.evaluation import few_label_probe, linear_probe, linear_probe_fit, logistic
from selfmask.evaluation.probe import PENALTIES, choose_penalty


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load_digits()
    x, y = torch.from_numpy(data.data).float(), torch.from_numpy(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1000], y[:1000], x[1000:], y[1000:]


def loss_of(weight: Tensor, bias: Tensor, x: Tensor, y: Tensor, penalty: float = 0.01) -> Tensor:
    """The recipe's objective in float64: mean loss + lambda / 2 |W|^2 with lambda = 0.01 / n."""
    scores = F.linear(F.normalize(x.double(), dim=1), weight.double(), bias.double())
    return F.cross_entropy(scores, y) + penalty / len(x) / 2 * weight.double().square().sum()


def optimum(x: Tensor, y: Tensor, penalty: float = 0.01) -> float:
    """By plain L-BFGS, started at the solution: it finds what is left to gain."""
    fit = linear_probe_fit(x, y, penalty=penalty)
    weight, bias = (each.double().clone().requires_grad_() for each in (fit.weight, fit.bias))
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=3000, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(weight, bias, x, y, penalty)
        loss.backward()
        return loss

    optimizer.step(closure)
    return float(loss_of(weight, bias, x, y, penalty).detach())


@pytest.mark.parametrize("images", [1000, 300, 40])  # more than features, and fewer
@pytest.mark.parametrize("penalty", [1e-4, 0.01, 1.0])
def test_reaches_the_optimum(digits: tuple[Tensor, Tensor, Tensor, Tensor], images: int, penalty: float) -> None:
    x, y = digits[0][:images], digits[1][:images]
    fit = linear_probe_fit(x, y, penalty=penalty)
    assert float(loss_of(fit.weight, fit.bias, x, y, penalty)) <= optimum(x, y, penalty) + 1e-4


def test_equals_scikit_learn(digits: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, y, test_x, test_y = digits
    # C sum(loss) + 1/2 |W|^2 is our objective with C = 1 / (n lambda) = 100, whatever n.
    model = LogisticRegression(C=100, max_iter=5000, tol=1e-7).fit(F.normalize(x.double(), dim=1), y)
    weight, bias = torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)
    fit = linear_probe_fit(x, y)
    assert float(loss_of(fit.weight, fit.bias, x, y)) <= float(loss_of(weight, bias, x, y)) + 1e-4
    theirs = (F.linear(F.normalize(test_x.double(), dim=1), weight, bias).argmax(1) == test_y).double().mean()
    assert linear_probe(*digits) == pytest.approx(float(theirs), abs=2.5 / 797)  # two images on the boundary, at most


def test_two_classes_are_a_softmax_too(digits: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, y = (each[digits[1] < 2] for each in digits[:2])
    fit = linear_probe_fit(x, y)
    assert fit.weight.shape == (2, 64)
    assert float(loss_of(fit.weight, fit.bias, x, y)) <= optimum(x, y) + 1e-4


def test_the_fit_is_what_is_measured(digits: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, y, test_x, test_y = digits
    fit = linear_probe_fit(x, y * 3 + 1)
    assert fit.classes.tolist() == [3 * i + 1 for i in range(10)]
    scores = F.linear(F.normalize(test_x, dim=1), fit.weight, fit.bias)
    expected = scores.argsort(1, descending=True)[:, :5] * 3 + 1
    assert torch.equal(fit.rank(test_x), expected)
    assert float((fit.rank(test_x)[:, 0] == test_y * 3 + 1).double().mean()) == linear_probe(*digits)


def test_memory_is_bounded_by_the_chunk(
    digits: tuple[Tensor, Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = linear_probe_fit(*digits[:2])
    monkeypatch.setattr(logistic, "_AT_ONCE", 10 * 33)
    assert torch.allclose(linear_probe_fit(*digits[:2]).weight, whole.weight, atol=0.05 * float(whole.weight.std()))


def test_how_far_it_is_is_told(digits: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    shares: list[float] = []
    linear_probe_fit(*digits[:2], on_progress=shares.append)
    assert len(shares) > 5
    assert shares[-1] == 1
    assert all(0 <= share <= 1 for share in shares)


def test_the_penalty_is_chosen_by_labels_held_back(digits: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, y = digits[0][:200] + 8 * torch.randn(200, 64), digits[1][:200]
    learned = label_split(y.tolist(), 0.8, 3)
    held_back = sorted(set(range(200)) - set(learned))
    accuracies = {
        penalty: float(
            (linear_probe_fit(x[learned], y[learned], penalty=penalty).rank(x[held_back])[:, 0] == y[held_back])
            .double()
            .mean()
        )
        for penalty in PENALTIES
    }
    assert len(set(accuracies.values())) > 1
    assert accuracies[choose_penalty(x, y, seed=3)] == max(accuracies.values())
    assert choose_penalty(torch.randn(10, 64), torch.arange(10)) == 0.01  # one of each: nothing to hold back


def test_few_labels_are_stratified_and_seeded(digits: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, y, test_x, test_y = digits
    mean, each = few_label_probe(x, y, test_x, test_y, fraction=0.03, seeds=3)
    assert few_label_probe(x, y, test_x, test_y, fraction=0.03, seeds=3) == (mean, each)
    assert len(each) == 3
    assert len(set(each)) > 1
    assert mean == pytest.approx(np.mean(each))
    chosen = label_split(y.tolist(), 0.03, 1)
    assert each[1] == linear_probe(x[chosen], y[chosen], test_x, test_y)
    assert 0.6 < mean < linear_probe(*digits)


def test_all_labels_is_the_linear_probe(digits: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    mean, each = few_label_probe(*digits, fraction=1.0, seeds=1)
    assert mean == each[0] == linear_probe(*digits)


def test_quick_on_4000_by_256() -> None:
    y = torch.randint(10, (5000,))
    x = F.relu(torch.randn(10, 256)[y] + 2 * torch.randn(5000, 256) + 1)
    start = time.process_time()
    assert linear_probe(x[:4000], y[:4000], x[4000:], y[4000:]) > 0.5
    assert time.process_time() - start < 10


def test_no_convergence_is_said(digits: tuple[Tensor, Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logistic, "_ITERATIONS", 2)
    with pytest.warns(UserWarning, match="did not converge"):
        linear_probe(*digits)


def test_one_class_is_refused() -> None:
    with pytest.raises(LabelsError, match="two or more classes"):
        linear_probe(torch.randn(5, 3), [1] * 5, torch.randn(5, 3), [1] * 5)


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(LabelsError, match="share"):
        few_label_probe(torch.randn(4, 3), [0, 1, 0, 1], torch.randn(4, 3), [0, 1, 0, 1], fraction=0.0)
