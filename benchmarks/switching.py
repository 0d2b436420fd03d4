"""`python -m benchmarks.switching`: what it takes to put another mask in place, against a forward pass of one image.

A view made anew (`MaskedModel.view`); the memory of a view written again, by the mask's bits, and by the weights that
are off alone (`masking/switching.py`); and a view whose layers write their weights as they run (passing). All give the
same weights, to the bit. Beside them, images of different masks that share a pass (`masking/mixing.py`). CPU time is
measured, since a busy machine disturbs it less than a clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from selfmask.masking import MaskedModel
from selfmask.masking.mixing import Mixing
from selfmask.masking.selection import tied_names
from selfmask.masking.switching import OffWeights, SpareView, Switch

from .many_masks import FEW, MANY, backbone, packed, template

FORWARD = "forward pass, 1 image"
SHARES = 0.001, FEW, MANY  # of weights that are off


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbones", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 224])
    parser.add_argument("--repeats", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        "", "off", "", "ms", "of a forward pass", "bytes kept", title="CPU time on one core; medians, interleaved"
    )
    for name in asked.backbones:
        for size in asked.sizes:
            for off in SHARES:
                found, kept = measured(name, size, off, asked.repeats)
                for what, seconds in found.items():
                    ratios = [own / whole for own, whole in zip(seconds, found[FORWARD], strict=True)]
                    row = f"{statistics.median(seconds) * 1e3:.1f}", f"{statistics.median(ratios):.2f}"
                    table.add_row(f"{name}, {size} px", f"{off:.1%}", what, *row, f"{kept.get(what, 0):,}")
    Console(width=140).print(table)
    return 0


@torch.no_grad()
def measured(name: str, size: int, off: float, repeats: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    of = backbone(name, size)
    base = of.model.eval().to(memory_format=torch.channels_last)
    like = template(of)
    masks = [packed(like, seed, off) for seed in range(8)]
    masked = MaskedModel(base)
    for number, mask in enumerate(masks):
        masked._packed[str(number)], masked._tied[str(number)] = mask, tied_names(base, list(mask.sizes))
    by_off = [Switch.of(mask, base) for mask in masks]
    by_bits = [_as_bits(switch, base) for switch in by_off]
    spare, other, view = SpareView(base), SpareView(base), masked.view("0")
    passing, mixing = SpareView(base, passing=True), Mixing.of(base, (size, size))
    assert mixing is not None
    mixed = mixing.view()
    images = torch.randn(16, 3, size, size).contiguous(memory_format=torch.channels_last)
    for number in (1, 0):
        spare.put(by_off[number])
        other.put(by_bits[number])
    assert torch.equal(view(images), spare.module(images))
    assert torch.equal(view(images), other.module(images))
    passing.put(by_off[0])
    assert torch.equal(view(images), passing.module(images))

    def share(count: int) -> None:
        mixed.put([(mixing.own(switch), 1) for switch in by_off[:count]])
        mixed.module(images[:count])

    calls: dict[str, Callable[[int], object]] = {
        FORWARD: lambda turn: view(images[:1]),
        "forward pass, 16 images, a 16th of it": lambda turn: view(images),
        "a view made anew": lambda turn: masked.view(str(turn % 2)),
        "the same memory, by bits": lambda turn: other.put(by_bits[turn % 2]),
        "the same memory, by weights that are off": lambda turn: spare.put(by_off[turn % 2]),
        "that, then 1 image": lambda turn: (spare.put(by_off[turn % 2]), spare.module(images[:1])),
        "1 image, passing": lambda turn: (passing.put(by_off[turn % 2]), passing.module(images[:1])),
        "1 image, in a pass that others could share": lambda turn: share(1),
        "8 images of 8 masks in one pass, an 8th of it": lambda turn: share(8),
    }
    found: dict[str, list[float]] = {what: [] for what in calls}
    for turn in range(repeats + 1):
        for what, call in calls.items():
            begin = time.process_time()
            call(turn)
            if turn:  # the first is for warming up
                found[what].append(
                    (time.process_time() - begin) / (16 if "16th" in what else 8 if "8th" in what else 1)
                )
    kept = dict(zip(list(calls)[3:5], (by_bits[0].nbytes, by_off[0].nbytes), strict=True))
    return found, kept


def _as_bits(switch: Switch, base: nn.Module) -> Switch:
    weights, bits = dict(base.named_parameters()), {}
    for name, each in switch.off.items():
        on = torch.empty(weights[name].numel())
        OffWeights((1.0,), each.gaps, each.bits).write(torch.ones_like(on), on)
        bits[name] = OffWeights(each.scales, bits=np.packbits(on.bool().numpy(), bitorder="little"))
    return Switch(bits, switch.norm)


if __name__ == "__main__":
    sys.exit(main())
