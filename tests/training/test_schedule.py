"""Rates: a rise, half a cosine, and never a step at zero."""

import math

import pytest

from selfmask.training.schedule import cosine


def test_without_warm_up_it_is_half_a_cosine() -> None:
    steps = 200
    rates = [cosine((step + 0.5) / steps) for step in range(steps)]
    assert rates == pytest.approx([(1 + math.cos(math.pi * (step + 0.5) / steps)) / 2 for step in range(steps)])
    assert rates == sorted(rates, reverse=True)


def test_warm_up_rises_to_one_where_the_cosine_begins() -> None:
    """The paper's supervised runs: up to epoch 40 of 150, then down to 0."""
    steps, warmup = 1500, 40 / 150
    rates = [cosine((step + 0.5) / steps, warmup) for step in range(steps)]
    assert max(rates) == pytest.approx(1, abs=1e-2)
    assert abs(rates.index(max(rates)) - 400) <= 1
    assert all(rate > 0 for rate in rates)  # the paper's code lost its first epoch to a rate of 0
