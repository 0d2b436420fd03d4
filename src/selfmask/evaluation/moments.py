"""Mean, covariance and principal components of vectors that come in batches.

scikit-learn's PCA wants all vectors at once, and its IncrementalPCA is an approximation; here memory is bounded by the
covariance, whatever the number of images, and the result is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LEAST = 1e-10  # of the largest variance; a direction with less has none but rounding
_LARGEST = 127  # of a code
_ROUNDING = 1e-12  # of the mean square: the variance of rounding in single precision, generously


class Principal(NamedTuple):
    """Directions of unit length as columns, the one of most variance first, and the variances along them."""

    vectors: Tensor
    variances: Tensor


class Coded(NamedTuple):
    """Directions in 8 bits: `codes` times `steps`, and the variances along what they were rounded to."""

    codes: Tensor
    """Whole numbers, int8."""
    steps: Tensor
    """Of each direction."""
    variances: Tensor

    @property
    def vectors(self) -> Tensor:
        return self.codes.double() * self.steps


class Moments:
    """Counts vectors and adds up their values and products, in double precision."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self._sum = torch.zeros(width, dtype=torch.float64)
        self._products = torch.zeros(width, width, dtype=torch.float64)

    def add(self, rows: Tensor, columns: Tensor | None = None) -> None:
        """Count vectors in; with `columns`, the rows are their values there, and elsewhere they are zero."""
        values = rows.double().cpu()
        self.count += len(values)
        if columns is None:
            self._sum += values.sum(0)
            self._products.addmm_(values.T, values)
        else:
            self._sum[columns] += values.sum(0)
            self._products[columns[:, None], columns] += values.T @ values

    @property
    def mean(self) -> Tensor:
        return self._sum / self.count

    def covariance(self) -> Tensor:
        """The unbiased one: over n - 1."""
        return (self._products - torch.outer(self._sum, self._sum) / self.count) / max(1, self.count - 1)

    def principal(self, count: int, covariance: Tensor | None = None) -> Principal:
        """The `count` directions of most variance. Where there is none but rounding, it is exactly 0."""
        values, vectors = torch.linalg.eigh(self.covariance() if covariance is None else covariance)
        values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
        # A direction and its opposite are equally good; one of them is chosen, so that results can be compared.
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
        least = torch.maximum(_LEAST * values[0], _ROUNDING * self._products.trace() / self.count)
        return Principal(vectors * largest.sign(), torch.where(values > least, values, 0.0))

    def coded(self, count: int) -> Coded:
        """The same in 8 bits, in steps of each direction's own."""
        covariance = self.covariance()
        found = self.principal(count, covariance)
        steps = (found.vectors.abs().amax(0) / _LARGEST).float()
        codes = (found.vectors / steps).round().contiguous()  # as they are loaded: sums then come out the same
        rounded = codes * steps
        variances = (rounded * (covariance @ rounded)).sum(0) * (found.variances > 0)
        return Coded(codes.to(torch.int8), steps, variances.float())
