"""Multinomial logistic regression, solved to its optimum, on the device that the features are on.

Our own solver, because it is several times faster than scikit-learn's `LogisticRegression` at the same optimum: the
features of a backbone vary far more in some directions than in others, which costs L-BFGS hundreds of steps. In
coordinates in which the loss curves alike in all directions it takes some tens.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]
from threadpoolctl import ThreadpoolController
from torch import Tensor

from .inputs import OnProgress

_AT_ONCE = 1 << 22  # probabilities held at a time: 16 MB, whatever the number of images
_ITERATIONS = 2000
_CLOSE = 2e-3  # see `_small_enough`
_SMALL = 1 << 22  # multiplications in a step
_FAR = 3  # times as large a gradient is no optimum


class Solution(NamedTuple):
    """Scores are `rows @ weight.T + bias`; `converged` is whether they are at the optimum."""

    weight: Tensor
    bias: Tensor
    converged: bool


def solve(rows: Tensor, targets: Tensor, classes: int, decay: float, on_progress: OnProgress | None = None) -> Solution:
    """The minimum of mean(cross-entropy) + decay / 2 |weight|^2 over weight [classes, F] and a bias free of penalty."""
    # The solver's own threads wait for work in a loop, and take the cores from those of torch: 3 to 8 times slower. In
    # small problems those of torch wait for each other longer than they work.
    small = rows.numel() * classes < _SMALL
    with _threads().limit(limits=1, user_api=None if small else "blas"):
        # As the bias is free, centring leaves the optimum where it is.
        mean = rows.mean(0)
        centred, basis = _span(rows - mean)
        problem = _Problem(centred, targets, classes, decay)
        point, converged = _minimum(problem, on_progress)
        weight, bias = problem.parameters(point)
        weight = (weight @ basis.T if basis is not None else weight).contiguous()
        return Solution(weight, bias - weight @ mean, converged)


def _minimum(problem: _Problem, on_progress: OnProgress | None) -> tuple[NDArray[np.float64], bool]:
    """Where the loss is least, and whether it is indeed."""
    last = largest = 1.0  # how many times the gradient is too large

    def loss_and_gradient(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        nonlocal last, largest
        loss, gradient = problem(point)
        last = max(float(np.linalg.norm(gradient)) / _small_enough(loss, problem.classes), 1.0)
        largest = max(largest, last)
        if on_progress is not None:  # steps shrink the gradient by about the same factor each
            on_progress(1 - math.log(last) / math.log(largest) if largest > 1 else 1.0)
        return loss, gradient

    def stop(_: NDArray[np.float64]) -> None:
        if last <= 1:
            raise StopIteration

    options = {"maxiter": _ITERATIONS, "maxfun": 2 * _ITERATIONS, "gtol": 0.0, "ftol": 1e-13, "maxls": 50}
    start = np.zeros(problem.size)
    found = minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options=options, callback=stop)
    converged = np.linalg.norm(found.jac) <= _FAR * _small_enough(found.fun, problem.classes)
    return found.x, bool(converged)


@cache
def _threads() -> ThreadpoolController:
    return ThreadpoolController()  # to look for thread pools takes as long as to solve a small problem


def _small_enough(loss: float, classes: int) -> float:
    """The length of a gradient at which the loss is about 1e-5 above its minimum, or less.

    That is |gradient|^2 / 2 over the curvature, which is 1 at the start and falls with the loss: where images are told
    apart without doubt, it is flat. Below a share of 0.01, rounding in float32 leaves no smaller gradients.
    """
    return _CLOSE * math.sqrt(max(loss / math.log(classes), 0.01))


def _span(centred: Tensor) -> tuple[Tensor, Tensor | None]:
    """Fewer images than features span fewer dimensions: coordinates in an orthonormal basis of these, and the basis.

    The penalty keeps the weight at 0 in all others.
    """
    if len(centred) >= centred.shape[1]:
        return centred, None
    basis, coordinates = torch.linalg.qr(centred.T)
    return coordinates.T.contiguous(), basis


class _Problem:
    """Loss and gradient in preconditioned coordinates, one flat float64 vector.

    weight = coordinates L^-1, where L L^T is the curvature of the loss in a row of the weight, at the start: the
    features' covariance over the number of classes, plus the penalty.
    """

    def __init__(self, rows: Tensor, targets: Tensor, classes: int, decay: float) -> None:
        self.rows, self.targets, self.classes, self.decay = rows, targets, classes, decay
        curvature = (rows.T @ rows).double().div_(len(rows) * classes)
        # A little more on the diagonal: rounding in float32 could take a curvature of zero below it.
        curvature.diagonal().add_(decay + 1e-7 * float(curvature.diagonal().max()))
        self.factor = torch.linalg.cholesky(curvature).float()
        self.size = classes * (rows.shape[1] + 1)

    def parameters(self, point: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
        """Weight and bias."""
        coordinates = torch.from_numpy(point).to(self.rows.device, torch.float32).view(self.classes, -1)
        weight = torch.linalg.solve_triangular(self.factor, coordinates[:, :-1], upper=False, left=False)
        return weight, coordinates[:, -1] * math.sqrt(self.classes)

    def __call__(self, point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weight, bias = self.parameters(point)
        # Sums over images are in float64 where they are of numbers: the line search compares losses that differ little.
        loss = torch.zeros((), dtype=torch.float64, device=self.rows.device)
        by_weight, by_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        at_once = max(1, _AT_ONCE // self.classes)
        for start in range(0, len(self.rows), at_once):
            rows, targets = (each[start : start + at_once] for each in (self.rows, self.targets))
            scores = torch.addmm(bias, rows, weight.T).log_softmax(1)
            loss -= scores.gather(1, targets[:, None]).sum(dtype=torch.float64)
            error = scores.exp_()  # probability, less 1 for the true class
            error[torch.arange(len(targets), device=targets.device), targets] -= 1
            by_weight.addmm_(error.T, rows)
            by_bias += error.sum(0)
        count = len(self.rows)
        by_weight = by_weight.div_(count).add_(weight, alpha=self.decay)
        gradient = torch.cat(
            [
                torch.linalg.solve_triangular(self.factor.T, by_weight, upper=True, left=False),
                by_bias[:, None] * (math.sqrt(self.classes) / count),
            ],
            1,
        )
        value = float(loss) / count + self.decay / 2 * float(weight.square().sum(dtype=torch.float64))
        return value, gradient.flatten().double().cpu().numpy()
