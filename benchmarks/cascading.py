"""`python -m benchmarks.cascading`: a cascade's vectors against those of its dispatcher alone, in time.

Two networks an image are twice the work, six are six times: the limits leave a tenth for routing, grouping, switching
masks and combining.
"""

from __future__ import annotations

import timm
import torch
from rich.console import Console
from torch import nn

from selfmask import CascadeConfig, fit_cascade
from selfmask.backbones import load_backbone
from selfmask.cascade.model import BATCH, CONDITIONAL, DISPATCHER, UNCONDITIONAL
from selfmask.data import SomeImages, open_images
from selfmask.data.pixels import fit, normalised
from selfmask.embedding.vectors import embed
from selfmask.preprocessing import Preprocessing

from .common import Row, as_table, timed

EXPERTS, MIXED, FITTED = 5, BATCH, 1500
LIMITS = {CONDITIONAL: 1 / 0.45, UNCONDITIONAL: (EXPERTS + 1) / 0.9}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear")


def main() -> int:
    tiny = load_backbone("selfmask/tiny")
    rows = cascade_rows("selfmask/tiny", tiny.model, tiny.preprocessing)
    resnet = timm.create_model("resnet18", num_classes=0)
    rows += cascade_rows("resnet18", resnet, Preprocessing((64, 64), *IMAGENET), batch_size=16, repeats=7)
    Console(width=150).print(as_table(rows))
    return 0 if all(row.holds for row in rows) else 1


def cascade_rows(
    name: str, model: nn.Module, preprocessing: Preprocessing, *, batch_size: int = 64, repeats: int = 15
) -> list[Row]:
    """On a mixed batch of real images, and for the small network also with everything around it."""
    images = SomeImages(open_images("selfmask/fashion"), range(FITTED))
    # Masks of few steps: what a mask holds does not matter to how long it takes.
    config = CascadeConfig.preset("fast", experts=EXPERTS, router="kmeans", steps=3, batch_size=batch_size, track=())
    cascade = fit_cascade(model, images, config, preprocessing=preprocessing)
    dispatcher = cascade.masked
    pixels = torch.stack([normalised(fit(images[i], preprocessing), preprocessing) for i in range(MIXED)])
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        groups = cascade.router(cascade.vectors(pixels, [DISPATCHER])[0]).bincount(minlength=EXPERTS).tolist()
    print(f"{name}: the {MIXED} images fall into groups of {groups}")

    def alone() -> None:
        if dispatcher.active_mask != DISPATCHER:
            dispatcher.set_mask(DISPATCHER)
        with torch.inference_mode():
            for part in torch.split(pixels, 64):  # as `embed` would
                dispatcher(part)

    def combined() -> None:
        with torch.inference_mode():
            cascade(pixels)

    rows = []
    for combination, limit in LIMITS.items():
        cascade.combination = combination
        rows.append(timed(f"{name}, {MIXED} images: {combination} / dispatcher alone", combined, alone, limit, repeats))
    if name == "selfmask/tiny":
        for combination, limit in LIMITS.items():
            cascade.combination = combination
            rows.append(
                timed(
                    f"{name}: embed {FITTED} images, {combination} / dispatcher alone",
                    lambda: embed(cascade, images, preprocessing, batch_size=MIXED),
                    lambda: (dispatcher.set_mask(DISPATCHER), embed(dispatcher, images, preprocessing)),
                    limit,
                    7,
                )
            )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
