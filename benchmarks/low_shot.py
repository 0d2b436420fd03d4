"""Few labels, and a backbone of ImageNet quality: masks learned without labels against learning from the labels.

    python -m benchmarks.low_shot [--seeds N] [--steps N] [--shares S ...]   runs what is missing, and prints the table:
                                                                             docs/train.md

The paper's order: where labels are fewest, a mask learned without labels, with a linear probe on top, is above a
supervised mask and above full fine-tuning. EfficientNet-Lite0 with its ImageNet weights at 64 pixels, CIFAR-10 (4,000
images, of tools/small_sets.py, in the folder that SELFMASK_DATA names). A seed draws the labels, too. Runs with labels
start from the probe of the frozen backbone, so they are at least as good as that before their first step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from selfmask.backbones import Backbone
from selfmask.commands.compare import CompareConfig, compare
from selfmask.data import open_images
from selfmask.evaluation.metrics import interval
from selfmask.memory import keep_memory
from selfmask.report.comparison import LABELS, Comparison, as_dict, markdown

from .gate import backbone_named

IMAGES, SIZE = "small-cifar10", 64
SHARES = (0.0025, 0.01, 0.05)  # of 4,000 labels: 1, 4 and 20 of a class
LOG = Path("docs/logs/low-shot.json")
RUNS = Path("runs/low-shot")


def load() -> Backbone:
    model, preprocessing = backbone_named("lite0")
    resized = dataclasses.replace(preprocessing, size=(SIZE, SIZE))
    return Backbone("lite0", model, resized, width=model.num_features)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=240, help="of the masks learned without labels")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the labels")
    given = parser.parse_args()
    keep_memory()  # as the command line does
    config = CompareConfig.preset(
        "fast",
        methods=("frozen", "self-mask", "mask", "full"),
        label_fractions=tuple(given.shares),
        seeds=given.seeds,
        adapt_steps=given.steps,
        size=SIZE,
    )
    train, test = (open_images(IMAGES, split=split) for split in ("train", "test"))
    found = compare(load, train, test, config, out=RUNS)
    LOG.write_text(json.dumps(as_dict(found), indent=1) + "\n")
    print(markdown(found))
    for share in found.shares:
        own = accuracies(found, "self-mask", share)
        for other in ("frozen", "mask", "full"):
            more = [100 * (mine - theirs) for mine, theirs in zip(own, accuracies(found, other, share), strict=True)]
            middle, width = interval(more)
            above = f"above {LABELS[other]} in {sum(each > 0 for each in more)} of {len(more)} draws"
            print(f"{100 * share:g} %: {above}, by {middle:+.1f} ± {width or 0:.1f} points")


def accuracies(found: Comparison, method: str, share: float) -> list[float]:
    """Of each draw of labels, in order."""
    return [each["accuracy"] for cell, each in found.results.items() if (cell.method, cell.share) == (method, share)]


if __name__ == "__main__":
    main()
