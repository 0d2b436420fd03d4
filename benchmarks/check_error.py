"""Is the error honest that `selfmask check` states? One mask, checked on many groups of images of one kind.

    python -m benchmarks.check_error RUN IMAGES [--split test] [--groups 30]

RUN is a run folder of `selfmask adapt`, IMAGES are images that it has not learned from. Every group has as many images
as the gate of the run held out. If the stated error is right, the gains of the groups scatter by as much.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from selfmask.commands.check import check, gain_of_run
from selfmask.commands.opening import load_embedder
from selfmask.data import SomeImages, open_images

GROUP = 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("images")
    parser.add_argument("--split", default="test")
    parser.add_argument("--groups", type=int, default=30)
    parser.add_argument("--backbone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    embedder = load_embedder(given.run, backbone=given.backbone)
    images = open_images(given.images, split=given.split)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
    groups = [order[start : start + GROUP] for start in range(0, len(order) - GROUP + 1, GROUP)][: given.groups]
    found = [check(embedder, SomeImages(images, sorted(group))) for group in groups]
    gains, errors = (torch.tensor([getattr(each, name) for each in found]) for name in ("gain", "gain_error"))
    if (own := gain_of_run(given.run)) is not None:
        print(f"the gate of the run: gain {own[0]:+.3f}, error {own[1]:.3f}")
    print(f"{len(groups)} groups of {GROUP} images: mean gain {gains.mean():+.3f}, lowest {gains.min():+.3f}, ", end="")
    print(f"highest {gains.max():+.3f}; helps in {sum(each.helps for each in found)}")
    scatter = gains.std() if len(gains) > 1 else torch.tensor(0.0)
    print(f"standard deviation of the gains {scatter:.3f}, mean stated error {errors.mean():.3f}")


if __name__ == "__main__":
    main()
