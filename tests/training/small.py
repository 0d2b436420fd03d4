"""A network and images that train in milliseconds: real pictures, few of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from selfmask import AdaptConfig, MaskConfig
from selfmask.data import open_images
from selfmask.data.views import ViewsConfig
from selfmask.objectives.swav import SwAVConfig
from selfmask.preprocessing import Preprocessing

HOW = Preprocessing((16, 16), (0.3, 0.3, 0.3), (0.35, 0.35, 0.35), "bilinear")


class Clothes(Dataset[tuple[Tensor, int]]):
    """The first pictures of the bundled set, with labels."""

    def __init__(self, number: int = 48) -> None:
        images = open_images("selfmask/fashion")
        assert images.labels is not None
        self.items = [(images[i], images.labels[i]) for i in range(number)]
        self.targets = [label for _, label in self.items]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.items[index]


def network(*, norm: bool = True, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    between: list[nn.Module] = [nn.BatchNorm2d(8)] if norm else []
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        *between,
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def config(**changes: Any) -> AdaptConfig:
    """Every part of the method in few steps: the queue fills and is used, prototypes are frozen at first."""
    start = AdaptConfig(
        steps=12,
        batch_size=8,
        lr=300.0,
        views=ViewsConfig(size=16, small_size=8, small=2),
        objective=SwAVConfig(projection=16, prototypes=20, queue_length=16, queue_start=0.2, freeze_prototypes=0.2),
        mask=MaskConfig(select="all", exclude=("*.bias",)) if "mask" not in changes else changes["mask"],
        log_every=1,
        checkpoint_every=3,
        track=(),
    )
    return dataclasses.replace(start, **changes)
