"""Running a backbone: what it takes and gives, found by trying, and in which mode and on which device it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .errors import ConfigError, NotABackboneError

_STRIDES = (14, 16, 28, 32)  # sides of patches and windows: most networks want a multiple of one of them


def features_of(model: nn.Module, side: int) -> int:
    """The length of the vectors that the model gives for square images of this side."""
    try:
        vectors = _try(model, side)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"the backbone does not accept images of {side} x {side} pixels",
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            todo="use the backbone's default size, or set another: --size",
        ) from error
    return as_vectors(vectors).shape[1]


def as_vectors(output: object) -> Tensor:
    """The output of a model, if it is one vector an image."""
    if not isinstance(output, Tensor) or output.ndim != 2:
        raise NotABackboneError(
            "the model does not map an image to one vector",
            expected="an output of shape [images, features]",
            found=list(output.shape) if isinstance(output, Tensor) else type(output).__name__,
            todo="pool its output; for timm models, use num_classes=0",
        )
    return output


def small_side(model: nn.Module, wanted: int, full: int) -> int:
    """The wanted side of small views, or the nearest that the model takes; `full` if it takes no other than that."""
    near = sorted({max(1, round(wanted / stride)) * stride for stride in _STRIDES}, key=lambda side: abs(side - wanted))
    for side in (wanted, *near):
        try:
            _try(model, side)
        except (RuntimeError, AssertionError, ValueError):
            continue
        return side
    return full


def _try(model: nn.Module, side: int) -> object:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            output: object = model(torch.zeros(1, 3, side, side, device=next(model.parameters()).device))
            return output
    finally:
        model.train(was_training)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards every module is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def best_device() -> torch.device:
    """The GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
