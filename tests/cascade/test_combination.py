"""Both combinations equal a dense, padded oracle in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from selfmask import Cascade
from selfmask.cascade.combination import Combination
from selfmask.cascade.model import CONDITIONAL, DISPATCHER, UNCONDITIONAL, expert_name
from selfmask.errors import CorruptCascadeError
from selfmask.evaluation.moments import Moments

from .small import EXPERTS, WIDTH, as_numpy, features, fitted, pixels

TRAIN = 200


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> Cascade:
    return fitted(tmp_path_factory.mktemp("masks"), images=TRAIN)


def concatenated(cascade: Cascade, images: Tensor, combination: str) -> Any:
    """e = [D, E_1 .. E_K], with zeros for all experts but the routed one if conditional: plain loops."""
    names = [DISPATCHER, *map(expert_name, range(EXPERTS))]
    parts = [as_numpy(features(cascade.masked, images, name)) for name in names]
    rows = np.zeros((len(images), WIDTH * (EXPERTS + 1)))
    chosen = cascade.router(features(cascade.masked, images, DISPATCHER)).tolist()
    for i in range(len(images)):
        rows[i, :WIDTH] = parts[0][i]
        for k in range(EXPERTS):
            if combination == UNCONDITIONAL or chosen[i] == k:
                rows[i, WIDTH * (1 + k) : WIDTH * (2 + k)] = parts[1 + k][i]
    return rows


@pytest.mark.parametrize("combination", [CONDITIONAL, UNCONDITIONAL])
def test_vectors_are_those_of_a_dense_oracle(cascade: Cascade, combination: str) -> None:
    train, images = pixels(TRAIN), pixels(240)[TRAIN:]
    e = concatenated(cascade, train, combination)
    values, directions = np.linalg.eigh(np.cov(e.T))
    values, directions = values[::-1][:WIDTH], directions[:, ::-1][:, :WIDTH]
    oracle = (concatenated(cascade, images, combination) - e.mean(0)) @ directions / np.sqrt(values)
    with torch.no_grad():
        found = as_numpy(cascade.vectors(images, [combination])[0])
    signs = np.sign((found * oracle).sum(0))  # a direction is as good as its opposite
    strong = values > 1e-3 * values[0]  # in weak ones, what 8 bits round away shows
    np.testing.assert_allclose(found[:, strong], (oracle * signs)[:, strong], atol=0.1)
    assert strong.sum() >= 5
    # And with what was stored instead of the oracle's own directions, all of it to the last digits.
    stored = cascade.combinations[combination]
    w = as_numpy(stored.codes) * as_numpy(stored.steps) / np.sqrt(as_numpy(stored.variances))
    np.testing.assert_allclose(
        found, concatenated(cascade, images, combination) @ w - as_numpy(stored.offset), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("combination", [CONDITIONAL, UNCONDITIONAL])
def test_whitened_vectors_have_unit_variance_on_the_training_images(cascade: Cascade, combination: str) -> None:
    with torch.no_grad():
        vectors = cascade.vectors(pixels(TRAIN), [combination])[0].double()
    assert vectors.shape == (TRAIN, WIDTH)
    torch.testing.assert_close(vectors.var(0), torch.ones(WIDTH).double(), atol=1e-3, rtol=0)
    torch.testing.assert_close(vectors.mean(0), torch.zeros(WIDTH).double(), atol=1e-3, rtol=0)


def numbers(rows: int, width: int) -> Tensor:
    """Features of very different variances, not centred."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).double()
    return (x * torch.logspace(0, -2, width)) @ torch.linalg.qr(x[:width])[0] + 2


@pytest.mark.parametrize(("scale", "power"), [("whiten", 0.5), ("none", 0.0), ("eigenvalues", 1.0)])
def test_scales_are_singular_values_or_eigenvalues(scale: Any, power: float) -> None:
    x, moments = numbers(300, 24), Moments(24)
    moments.add(x)
    combination = Combination.fit(moments, 8, scale)
    found = combination(x[:, :8].float(), {k: x[:, 8 * (1 + k) : 8 * (2 + k)].float() for k in range(2)})
    variances = np.linalg.eigvalsh(np.cov(x.T))[::-1][:8]
    expected = variances ** (1 - 2 * power)  # 1, as it is, or 1 / eigenvalue
    np.testing.assert_allclose(found.var(0), expected, rtol=0.02)


def test_directions_that_no_image_takes_stay_zero() -> None:
    x, moments = numbers(300, 24)[:6], Moments(24)
    moments.add(x)
    combination = Combination.fit(moments, 8)
    found = combination(x[:, :8].float(), {k: x[:, 8 * (1 + k) : 8 * (2 + k)].float() for k in range(2)})
    assert torch.isfinite(found).all()
    assert (found[:, 5:] == 0).all()
    torch.testing.assert_close(found[:, :5].var(0), torch.ones(5), atol=1e-3, rtol=0)


def test_stored_and_read_it_is_the_same_to_the_bit(cascade: Cascade) -> None:
    first = cascade.combinations[CONDITIONAL]
    again = Combination.of(first.tensors(), WIDTH, EXPERTS)
    x = torch.randn(5, WIDTH)
    assert torch.equal(first(x, {1: x}), again(x, {1: x}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("codes", torch.zeros(WIDTH, WIDTH, dtype=torch.int8)),
        ("steps", torch.zeros(3)),
        ("centre", torch.full((WIDTH,), torch.inf)),
        ("extra", torch.zeros(1)),
    ],
)
def test_unsound_combinations_are_refused(cascade: Cascade, name: str, value: Tensor) -> None:
    with pytest.raises(CorruptCascadeError):
        Combination.of(cascade.combinations[CONDITIONAL].tensors() | {name: value}, WIDTH, EXPERTS)


def test_one_expert(tmp_path: Path) -> None:
    """Then both combinations are the same."""
    cascade = fitted(tmp_path, experts=1)
    with torch.no_grad():
        conditional, unconditional = cascade.vectors(pixels(20), [CONDITIONAL, UNCONDITIONAL])
    torch.testing.assert_close(conditional, unconditional)
