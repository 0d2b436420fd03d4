"""What the training loop asks of an objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

Metrics = dict[str, float | Tensor]


class Objective(nn.Module, ABC):
    """A loss with its own trainable heads. Heads and any other state of training live in its `state_dict`.

    One optimizer step is: `before_step`, then `loss` and backward once per micro-batch, then `after_backward`,
    then the optimizer. `progress` is the share of the run that is done, from 0 to below 1.
    """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, progress: float) -> tuple[Tensor, Metrics]:
        """The loss of `model`, which maps images to vectors, on one batch, and numbers worth logging."""

    def before_step(self) -> None:
        """Called before the forward pass of each optimizer step."""

    def after_backward(self, progress: float) -> None:
        """Called when the gradients of a step are complete, before the optimizer uses them."""
