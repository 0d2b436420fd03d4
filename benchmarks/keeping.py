"""`python -m benchmarks.keeping`: memory that stays with the process between steps, against glibc giving it back."""

from __future__ import annotations

from collections.abc import Callable

import timm
import torch
from rich.console import Console

from selfmask.memory import keep_memory

from .common import Row, as_table, own_process, timed
from .training import step

TIMES = 5  # steps within one measure
Maker = Callable[..., Callable[[], object]]


def rows() -> list[Row]:
    return [
        row("resnet50, 224 px: embed 32 images, memory kept / not kept", forward, "resnet50", 224, 32),
        row("resnet18, 64 px: embed 64 images, memory kept / not kept", forward, "resnet18", 64, 64),
        row("resnet18, 64 px: train on 64 images, memory kept / not kept", train, "resnet18"),
    ]


def row(what: str, maker: Maker, *arguments: object) -> Row:
    with (
        own_process(repeated, True, maker, *arguments) as kept,
        own_process(repeated, False, maker, *arguments) as not_kept,
    ):
        return timed(f"{what}, {TIMES} times", kept, not_kept, None, repeats=5)


def repeated(keep: bool, maker: Maker, *arguments: object) -> Callable[[], object]:
    """In a process of its own, since it cannot be undone."""
    if keep and not keep_memory():
        raise RuntimeError("another C library, or a MALLOC_ variable is set")
    run = maker(*arguments)

    def times() -> None:
        for _ in range(TIMES):
            run()

    return times


def forward(name: str, size: int, batch: int) -> Callable[[], object]:
    model = timm.create_model(name, num_classes=0).eval().to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    return torch.inference_mode()(lambda: model(images))


def train(name: str) -> Callable[[], object]:
    return step("masked", timm.create_model(name, num_classes=0), passes=1)


if __name__ == "__main__":
    Console(width=150).print(as_table(rows()))
