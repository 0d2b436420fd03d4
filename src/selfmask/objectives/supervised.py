"""Cross-entropy: learning from labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Health, Objective
from .heads import Head, MaskedHead


class Supervised(Objective):
    """The classes of a batch of (views, labels), predicted by the head from each view."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def loss(self, model: nn.Module, batch: Any, progress: float) -> tuple[Tensor, Health]:
        views, labels = batch
        if isinstance(self.head, MaskedHead):
            self.head.masked.progress = progress
        logits = torch.stack([self.head(model(view)) for view in views]).float()  # [views, images, classes]
        losses = [F.cross_entropy(of_view, labels) for of_view in logits]
        right = (logits.detach().argmax(2) == labels).float().mean()
        return torch.stack(losses).mean(), Health(more={"accuracy": right})
