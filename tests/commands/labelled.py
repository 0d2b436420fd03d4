"""Few real pictures with labels, in two parts."""

from __future__ import annotations

import dataclasses
from typing import Any

from selfmask import TrainConfig
from selfmask.data import Images, SomeImages, open_images


def clothes(train: int = 60, test: int = 40) -> tuple[Images, Images]:
    """The first pictures of each part of the bundled set."""
    parts = (open_images("selfmask/fashion", split=split) for split in ("train", "test"))
    first, second = (SomeImages(images, range(count)) for images, count in zip(parts, (train, test), strict=True))
    return first, second


def config(**changes: Any) -> TrainConfig:
    small = TrainConfig.preset("fast", steps=6, batch_size=8, size=16, log_every=1, checkpoint_every=2, track=())
    return dataclasses.replace(small, **changes)
