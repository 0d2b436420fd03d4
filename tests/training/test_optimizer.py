"""PerTensorSGD against a naive loop in numpy, and against what its promises say."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from selfmask.training.optimizer import PerTensorSGD

SHAPES = ((4, 3, 3), (5,), (2, 6))
RATES = (0.1, 0.3, 0.05, 0.2, 0.2, 0.01, 0.4, 0.1)


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    """Of very different sizes, from tensor to tensor and from step to step."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) * 10.0 ** (-3 * i) * (1 + step) for i, shape in enumerate(SHAPES)]


def optimizer(own: list[nn.Parameter], **settings: Any) -> PerTensorSGD:
    return PerTensorSGD([{"params": own, "lr": 0.1, "per_tensor": True} | settings], momentum=0.9)


def take(
    sgd: PerTensorSGD, own: list[nn.Parameter], step: int, lr: float, factors: tuple[float, ...] = (1, 1, 1)
) -> None:
    for group in sgd.param_groups:
        group["lr"] = lr
    for parameter, gradient, factor in zip(own, gradients(step), factors, strict=True):
        parameter.grad = gradient * factor
    sgd.step()


def naive(weight_decay: float = 0.0, rates: tuple[float, ...] = RATES) -> list[Any]:
    """In float64, one tensor at a time, straight from the definition."""
    results = []
    for index, parameter in enumerate(parameters()):
        x = parameter.detach().double().numpy().copy()
        squares: list[float] = []
        momentum = None
        for step, lr in enumerate(rates):
            g = gradients(step)[index].double().numpy()
            squares.append(float((g**2).mean()))
            weights = [0.95 ** (len(squares) - 1 - i) for i in range(len(squares))]
            size = (sum(w * s for w, s in zip(weights, squares, strict=True)) / sum(weights)) ** 0.5
            if lr == 0:
                continue
            d = g / size + weight_decay * x
            momentum = d if momentum is None else 0.9 * momentum + d
            x = x - lr * momentum
        results.append(x)
    return results


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_a_naive_loop(weight_decay: float) -> None:
    own = parameters()
    sgd = optimizer(own, weight_decay=weight_decay)
    for step, lr in enumerate(RATES):
        take(sgd, own, step, lr)
    for parameter, expected in zip(own, naive(weight_decay), strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_rate_of_zero_only_measures() -> None:
    rates = (0.0, 0.0, 0.2, 0.1, 0.0, 0.1)
    own = parameters()
    sgd = optimizer(own)
    for step, lr in enumerate(rates):
        before = [parameter.detach().clone() for parameter in own]
        momenta = [sgd.state[p].get("momentum_buffer") for p in own]
        momenta = [None if m is None else m.clone() for m in momenta]
        take(sgd, own, step, lr)
        if lr:
            continue
        for parameter, kept, momentum in zip(own, before, momenta, strict=True):
            assert torch.equal(parameter, kept)
            now = sgd.state[parameter].get("momentum_buffer")
            assert now is None if momentum is None else torch.equal(now, momentum)
            assert float(sgd.state[parameter]["mean_square"]) > 0
    for parameter, expected in zip(own, naive(rates=rates), strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [1e-9, 0.01, 7.0, 1e9])
def test_the_size_of_a_tensors_gradients_means_nothing(factor: float) -> None:
    own, other = parameters(), parameters()
    first, second = optimizer(own), optimizer(other)
    for step, lr in enumerate(RATES):
        take(first, own, step, lr)
        take(second, other, step, lr, (1, factor, 1))
    for index, (a, b) in enumerate(zip(own, other, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert index == 1 or torch.equal(a, b)


def test_a_step_has_the_size_of_its_rate() -> None:
    """The first gradient is its own measure: its root mean square becomes 1."""
    own = parameters()
    before = [parameter.detach().clone() for parameter in own]
    take(optimizer(own), own, 0, 0.25)
    for parameter, start in zip(own, before, strict=True):
        assert float((parameter.detach() - start).square().mean().sqrt()) == pytest.approx(0.25, rel=1e-5)


def test_other_groups_are_plain_sgd() -> None:
    own, other, scored = parameters(), parameters(), parameters(1)
    groups = [{"params": scored, "per_tensor": True}, {"params": own, "per_tensor": False, "weight_decay": 0.01}]
    sgd = PerTensorSGD(groups, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(other, lr=0.1, momentum=0.9, weight_decay=0.01)
    for step, lr in enumerate((*RATES, 0.0, 0.1)):
        for group in (*sgd.param_groups, *plain.param_groups):
            group["lr"] = lr
        for a, b, c, gradient in zip(own, other, scored, gradients(step), strict=True):
            a.grad, b.grad, c.grad = gradient.clone(), gradient.clone(), gradient.clone()
        sgd.step()
        plain.step()
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))
    assert all("mean_square" not in sgd.state[parameter] for parameter in own)


def test_gradients_that_are_nothing_or_next_to_it() -> None:
    """Zeros give no NaN, and gradients whose squares are no numbers any more give no giant steps."""
    for size in (0.0, 1e-45, 1e-30, 1e-22):
        own = parameters()
        before = [parameter.detach().clone() for parameter in own]
        sgd = optimizer(own)
        for _ in range(3):
            for parameter in own:
                parameter.grad = torch.full_like(parameter, size)
            sgd.step()
        for parameter, start in zip(own, before, strict=True):
            assert parameter.isfinite().all()
            assert float((parameter.detach() - start).abs().max()) <= 0.1 * 6  # no more than three usual steps
    assert all(torch.equal(a, b) for a, b in zip(parameters(), before, strict=True))


def test_a_parameter_without_gradient_is_left_alone() -> None:
    own = parameters()
    sgd = optimizer(own)
    own[0].grad = gradients(0)[0]
    sgd.step()
    assert torch.equal(own[1], parameters()[1])
    assert own[1] not in sgd.state or not sgd.state[own[1]]


def test_a_closure_is_run_before_gradients_are_measured() -> None:
    own, other = parameters(), parameters()
    first, second = optimizer(own), optimizer(other)

    def closure() -> Tensor:
        first.zero_grad()
        loss = sum((p.square().sum() * 1e-3 for p in own), torch.zeros(()))
        loss.backward()
        return loss

    for _ in range(3):
        loss = first.step(closure)
        second.zero_grad()
        sum((p.square().sum() * 1e-3 for p in other), torch.zeros(())).backward()
        second.step()
    assert loss.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


@pytest.mark.parametrize("stop", [1, 2, 5])
def test_a_run_goes_on_exactly_from_its_state(stop: int) -> None:
    """Stopped while it only measures, when it has just begun, and later; through a file, as checkpoints do."""
    rates = (0.0, *RATES)
    own = parameters()
    sgd = optimizer(own)
    for step in range(stop):
        take(sgd, own, step, rates[step])
    file = io.BytesIO()
    torch.save({"optimizer": sgd.state_dict(), "parameters": [p.detach().clone() for p in own]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = [nn.Parameter(value) for value in saved["parameters"]]
    resumed = optimizer(other)
    resumed.load_state_dict(saved["optimizer"])
    for step in range(stop, len(rates)):
        take(sgd, own, step, rates[step])
        take(resumed, other, step, rates[step])
    assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))
    assert all(
        torch.equal(sgd.state[a]["mean_square"], resumed.state[b]["mean_square"])
        for a, b in zip(own, other, strict=True)
    )
