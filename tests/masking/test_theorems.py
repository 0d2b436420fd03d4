"""The paper's two theorems on a real training run: one learning rate subsumes threshold and start of the scores.

Shift: (S0 + a, mu + a) and scale: (c S0, c lr) change no mask at any step under SGD, momentum included. In real
arithmetic that is exact; in float32 it is where no rounding differs: scaling by powers of two, and shifting
within one binade, whose numbers lie on one grid.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

from selfmask import MaskConfig, get_masked_model

from .architectures import digits_base

STEPS, BATCH, LR = 25, 32, 40.0
few_examples = settings(max_examples=8, deadline=None, derandomize=True)


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x = torch.from_numpy(images[order]).float().div(8).sub(1).view(-1, 1, 8, 8)
    return x, torch.from_numpy(labels[order])


@dataclasses.dataclass
class Run:
    """What a training run left: the mask (1 on, 0 off) and the loss of every step, and the final scores."""

    masks: list[np.ndarray]
    losses: list[float]
    scores: list[Tensor]

    def differs_from(self, other: Run) -> float:
        """The largest share of weights, over the steps, that is on in one run and off in the other."""
        return max(float(np.mean(a != b)) for a, b in zip(self.masks, other.masks, strict=True))


@functools.cache
def run(s0: float, mu: float, lr: float = LR, momentum: float = 0.9, weight_decay: float = 0.0) -> Run:
    masked = get_masked_model(digits_base(), MaskConfig(s0=s0, mu=mu))
    optimizer = torch.optim.SGD(masked.scores.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    x, y = digits()
    result = Run([], [], [])
    masked.train()
    for step in range(STEPS):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        loss = cross_entropy(masked(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bits = [np.unpackbits(packed, count=n) for packed, n in _packed(masked)]
        result.masks.append(np.concatenate(bits))
        result.losses.append(float(loss.detach()))
    result.scores = [score.detach().clone() for score in masked.scores.parameters()]
    return result


def _packed(masked: torch.nn.Module) -> list[tuple[np.ndarray, int]]:
    mask = masked.pack()
    return [(mask.bits[name], mask.sizes[name]) for name in mask.bits]


def test_the_run_is_a_real_one() -> None:
    """Weights go off and on again and the loss falls; else the theorems would say nothing here."""
    reference = run(1.0, 0.0)
    masks = np.stack(reference.masks).astype(int)
    assert 0.5 < masks[-1].mean() < 0.99
    change = np.diff(masks, axis=0)
    assert (change < 0).sum() > 20
    assert (change > 0).sum() > 20
    assert np.mean(reference.losses[-5:]) < reference.losses[0] - 0.1


@few_examples
@given(exponent=st.integers(-10, 10), momentum=st.sampled_from([0.0, 0.9]))
def test_scaling_by_powers_of_two_is_exact(exponent: int, momentum: float) -> None:
    c = 2.0**exponent
    reference, scaled = run(1.0, 0.0, momentum=momentum), run(c, 0.0, lr=c * LR, momentum=momentum)
    assert scaled.differs_from(reference) == 0
    assert scaled.losses == reference.losses
    for a, b in zip(reference.scores, scaled.scores, strict=True):
        assert torch.equal(c * a, b)


@few_examples
@given(c=st.floats(0.01, 100))
def test_scaling_by_any_number(c: float) -> None:
    """Rounding may decide otherwise where a score lies on the threshold to seven digits."""
    assert run(c, 0.0, lr=c * LR).differs_from(run(1.0, 0.0)) < 0.005


@few_examples
@given(exponent=st.integers(-6, 6), momentum=st.sampled_from([0.0, 0.9]))
def test_scaling_takes_the_threshold_along(exponent: int, momentum: float) -> None:
    c = 2.0**exponent
    reference = run(1.25, 0.25, momentum=momentum)
    assert run(1.25 * c, 0.25 * c, lr=c * LR, momentum=momentum).differs_from(reference) == 0


@few_examples
@given(shift=st.integers(-150, 150), momentum=st.sampled_from([0.0, 0.9]))
def test_shifting_within_a_binade_is_exact(shift: int, momentum: float) -> None:
    """All scores stay between 1024 and 2048, where float32 is a grid of 2^-13: a whole shift is exact there."""
    reference = run(1537.0, 1536.0, momentum=momentum)
    shifted = run(1537.0 + shift, 1536.0 + shift, momentum=momentum)
    for a, b in zip(reference.scores, shifted.scores, strict=True):
        assert min(a.min(), b.min()) > 1024
        assert max(a.max(), b.max()) < 2048
        assert torch.equal(a + shift, b)
    assert shifted.differs_from(reference) == 0
    assert shifted.losses == reference.losses


@few_examples
@given(shift=st.floats(-8, 8))
def test_shifting_by_any_number(shift: float) -> None:
    """From the paper's start, S0 = 1 and mu = 0, as far as rounding allows."""
    assert run(1.0 + shift, shift).differs_from(run(1.0, 0.0)) < 0.005


def test_both_at_once() -> None:
    """What counts is (S0 - mu) / lr alone."""
    assert run(6.0, 4.0, lr=2 * LR).differs_from(run(1.0, 0.0)) < 0.005
    assert run(1.0, 0.0, lr=2 * LR).differs_from(run(1.0, 0.0)) > 0.01


def test_weight_decay_breaks_the_shift() -> None:
    """It pulls scores to 0, which is the threshold before the shift and far below it afterwards."""
    decay = 1e-3 / LR
    assert run(9.0, 8.0).differs_from(run(1.0, 0.0)) < 0.005  # the same shift without weight decay
    reference, shifted = run(1.0, 0.0, weight_decay=decay), run(9.0, 8.0, weight_decay=decay)
    assert shifted.differs_from(reference) > 0.05
    assert shifted.masks[-1].mean() < reference.masks[-1].mean()


@pytest.mark.parametrize("c", [0.5, 2.0, 4.0])
def test_scaling_holds_with_weight_decay_scaled_inversely(c: float) -> None:
    decay = 1e-2 / LR
    reference = run(1.0, 0.0, weight_decay=decay)
    assert reference.differs_from(run(1.0, 0.0)) > 0  # it does something
    assert run(c, 0.0, lr=c * LR, weight_decay=decay / c).differs_from(reference) == 0
    assert run(c, 0.0, lr=c * LR, weight_decay=decay).differs_from(reference) > 0
