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

from .common import BATCH, SIZE, Row, as_row, pairs, peak_memory

STEPS_FOR_MEMORY = 4
ROUNDS = 5


def rows(name: str) -> list[Row]:
    base = timm.create_model(name, num_classes=0)
    result = []
    for passes, limit in ((1, 1.05), (2, 1.03)):
        measured = []
        # Where a network happens to lie in memory is worth some percent, for as long as it lies there: build several.
        for _ in range(ROUNDS):
            ours, other = step("masked", copy.deepcopy(base), passes), step("full", copy.deepcopy(base), passes)
            measured += pairs(ours, other, repeats=8 // passes)
        label = "masked / full training step" + (", two forward passes" if passes == 2 else "")
        result.append(as_row(f"{name}: {label}", measured, limit))
    mine, theirs = peak_of(name, "masked"), peak_of(name, "full")
    megabytes = f"{mine / 2**20:.0f} MB", f"{theirs / 2**20:.0f} MB"
    result.append(Row(f"{name}: masked / full peak memory", *megabytes, mine / theirs, 1.15))
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
    for _ in range(STEPS_FOR_MEMORY):
        run()
    print(peak_memory())
