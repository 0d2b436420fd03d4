"""Moments of batches are those of all vectors at once; principal components are scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from selfmask.evaluation.moments import Moments

from ..cascade.small import as_numpy, pixels


def some(rows: int = 60, width: int = 12) -> torch.Tensor:
    """Real numbers of real pictures, far from centred."""
    return pixels(rows).flatten(1)[:, 300 : 300 + width] + 3


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_batches_do_not_matter(sizes: list[int]) -> None:
    rows, moments = some(sum(sizes)) if sum(sizes) > 1 else some(2)[:1], Moments(12)
    for part in rows.split(sizes):
        moments.add(part)
    assert moments.count == len(rows)
    np.testing.assert_allclose(moments.mean, as_numpy(rows).mean(0), rtol=1e-12)
    if len(rows) > 1:
        np.testing.assert_allclose(moments.covariance(), np.cov(as_numpy(rows).T), rtol=1e-8, atol=1e-12)


def test_values_at_some_columns_are_zero_elsewhere() -> None:
    rows, moments = some(40), Moments(20)
    padded = np.zeros((40, 20))
    for start, columns in ((0, [0, 1, 2, 9]), (20, [0, 1, 2, 15])):
        own = rows[start : start + 20, :4]
        moments.add(own, torch.tensor(columns))
        padded[start : start + 20, columns] = as_numpy(own)
    np.testing.assert_allclose(moments.mean, padded.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.covariance(), np.cov(padded.T), rtol=1e-8, atol=1e-12)


def test_principal_components_are_those_of_scikit_learn() -> None:
    rows, moments = some(200), Moments(12)
    moments.add(rows)
    found, oracle = moments.principal(5), PCA(5, svd_solver="full").fit(as_numpy(rows))
    np.testing.assert_allclose(found.variances, oracle.explained_variance_, rtol=1e-8)
    cosines = np.abs((as_numpy(found.vectors).T * oracle.components_).sum(1))
    np.testing.assert_allclose(cosines, 1, atol=1e-6)


def test_of_a_direction_and_its_opposite_always_the_same_is_chosen() -> None:
    rows, moments = some(100), Moments(12)
    moments.add(rows)
    vectors = moments.principal(12).vectors
    assert bool((vectors.gather(0, vectors.abs().argmax(0, keepdim=True)) > 0).all())


@pytest.mark.parametrize("rows", [2, 5])
def test_where_there_is_no_variance_it_is_exactly_zero(rows: int) -> None:
    moments = Moments(12)
    moments.add(some(rows))
    variances = moments.principal(12).variances
    assert (variances > 0).sum() == rows - 1
    assert (variances[rows - 1 :] == 0).all()
