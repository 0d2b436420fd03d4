"""A masked training step against full fine-tuning with the same optimizer: time, and peak memory."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import timm
import torch
from torch import nn

from selfmask import MaskConfig, get_masked_model
from selfmask.memory import keep_memory

from .common import BATCH, SIZE, Row, apart, as_row, pairs, peak_memory

STEPS_FOR_MEMORY = 4
ROUNDS = 8


def rows(name: str) -> list[Row]:
    what = f"{name}: masked / full training step"
    # Memory is kept as in our commands; for both sides, so they cannot take each other's memory either.
    one, two = apart(measured, name, 1, True), apart(measured, name, 2, True)
    default = apart(measured, name, 1, False)
    mine, theirs = peak_of(name, "masked"), peak_of(name, "full")
    megabytes = f"{mine / 2**20:.0f} MB", f"{theirs / 2**20:.0f} MB"
    return [
        as_row(what, one, 1.05),
        as_row(f"{what}, two forward passes", two, 1.03),
        as_row(f"{what}, memory not kept", default, None),
        Row(f"{name}: masked / full peak memory", *megabytes, mine / theirs, 1.15),
    ]


def measured(name: str, passes: int, keep: bool) -> list[tuple[float, float]]:
    if keep:
        keep_memory()
    base, result = timm.create_model(name, num_classes=0), []
    # Where a network happens to lie in memory is worth some percent, for as long as it lies there: build several.
    for _ in range(ROUNDS):
        ours, other = step("masked", copy.deepcopy(base), passes), step("full", copy.deepcopy(base), passes)
        result += pairs(ours, other, repeats=6 // passes)
    return result


def step(kind: str, model: nn.Module, passes: int) -> Callable[[], None]:
    """One training step of either kind on fixed images."""
    model.train()
    if kind == "masked":
        model = get_masked_model(model, MaskConfig(select="paper-resnet"))
        parameters, lr = list(model.scores.parameters()), 50.0
    else:
        parameters, lr = list(model.parameters()), 1e-4
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    images = torch.randn(BATCH, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))

    def run() -> None:
        optimizer.zero_grad()
        sum(model(images).square().mean() for _ in range(passes)).backward()  # type: ignore[union-attr]
        optimizer.step()

    return run


def peak_of(name: str, kind: str) -> int:
    command = [sys.executable, "-m", "benchmarks.training", name, kind]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    run = step(sys.argv[2], timm.create_model(sys.argv[1], num_classes=0), passes=1)
    keep_memory()
    for _ in range(STEPS_FOR_MEMORY):
        run()
    print(peak_memory())
