"""`make bench`: every promise about speed and size, measured in one run; fails if one does not hold."""

from __future__ import annotations

import sys

import timm
from rich.console import Console

from . import serving, storage, training
from .common import Row, as_table, imagenet_lite0, learn_mask

RESNETS = ("resnet18", "resnet50")


def main() -> int:
    console = Console(width=150)
    rows: list[Row] = []
    for name in RESNETS:
        console.print(f"training and forward passes of {name} ...")
        rows += training.rows(name)
        rows += serving.forward_rows(name)
    console.print("learning masks on real images (a few minutes) ...")
    # No weights of a ResNet are at hand: theirs are random, and no branch may start at zero, or it would not learn.
    resnet18, resnet50 = (timm.create_model(name, num_classes=0, zero_init_last=False) for name in RESNETS)
    masks = {
        "efficientnet_lite0 (ImageNet)": learn_mask(imagenet_lite0(), lr=20, steps=120, size=64),
        "resnet18 (random)": learn_mask(resnet18, lr=25, steps=200, select="paper-resnet"),
        "resnet50 (random)": learn_mask(resnet50, lr=1.0, steps=100, select="paper-resnet"),
    }
    learned, table = storage.learned_rows(masks)
    rows += learned + storage.synthetic_rows()
    rows += storage.range_coder_rows("resnet50 (random)", masks["resnet50 (random)"])
    other = learn_mask(resnet50, lr=1.0, steps=90, select="paper-resnet")
    rows += serving.loading_rows(resnet50, [masks["resnet50 (random)"], other])
    console.print(table)
    console.print(as_table(rows))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
