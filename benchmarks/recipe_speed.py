"""`python -m benchmarks.recipe_speed`: images per second of `fast`, against what `fast` was at first.

Whole runs of `adapt` without a gate, with sixty steps for every thousand images, as a run of 240 steps on 4,000 images
has; the teacher's passes over all images are part of it. ResNet-50 at 64 pixels; weights do not
matter for speed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import timm
import torch
from rich.console import Console

from selfmask import AdaptConfig, adapt
from selfmask.data import SomeImages, open_images
from selfmask.memory import keep_memory
from selfmask.preprocessing import IMAGENET
from selfmask.training.config import Precision

from .common import Row, as_table, own_process, pairs
from .first_recipe import FIRST, for_backbone

SIZE, IMAGES, STEPS, ROUNDS = 64, 500, 30, 3
LIMIT = 1 / 1.5


def side(which: str, precision: Precision = "float32") -> Callable[[], object]:
    keep_memory()  # as the command line does
    torch.manual_seed(0)
    model = timm.create_model("resnet50", num_classes=0)
    first = for_backbone(FIRST, model).changed(precision=precision)
    config = AdaptConfig.preset("fast") if which == "fast" else first
    config = config.changed(steps=STEPS, gate=False, track=(), size=SIZE)
    images = SomeImages(open_images("selfmask/fashion"), range(IMAGES))

    def run() -> None:
        adapt(model, images, config, preprocessing=IMAGENET, report=False)

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told = "what the first recipe computes with: at first, a CPU computed in float32 whatever it could"
    parser.add_argument("--precision", choices=("float32", "auto"), default="float32", help=told)
    precision = parser.parse_args().precision
    with own_process(side, "fast") as ours, own_process(side, "first", precision) as first:
        measured = pairs(ours, first, ROUNDS)
    seen = STEPS * AdaptConfig.preset("fast").batch_size
    speeds = [f"{seen / statistics.median(each):.0f} images/s" for each in zip(*measured, strict=True)]
    ratio = statistics.median(mine / theirs for mine, theirs in measured)
    row = Row("time per image, fast against the first recipe, ResNet-50", *speeds, ratio, LIMIT)
    Console(width=150).print(as_table([row]))
    return 0 if row.holds else 1


if __name__ == "__main__":
    sys.exit(main())
