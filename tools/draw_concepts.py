"""Draw the pictures of the concept pages, from the bundled network and images: docs/mask.png, gate.png, whitening.png.

    python -m tools.draw_concepts RUN

RUN is the run folder of `selfmask demo`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from selfmask import MaskedModel
from selfmask.backbones import load_backbone
from selfmask.data import SomeImages, open_images
from selfmask.data.distortions import DISTORTIONS
from selfmask.embedding.vectors import embed
from selfmask.evaluation.whitening import scales
from selfmask.files import RunFile

DOCS = Path(__file__).parents[1] / "docs"
KINDS = ("noise", "blur", "rotation", "missing patch", "shift", "no colour", "darker or brighter")
LAYER = "layer3.0.conv1.weight"
ROWS, COLUMNS = 24, 48  # of the weights shown
BLUE, ORANGE, GREY = "#24618f", "#8a5a12", "#646b73"


def draw_mask(run: Path) -> None:
    """A part of one layer: its weights, the mask that the run learned, and what the network runs with."""
    backbone = load_backbone("selfmask/tiny")
    masked = MaskedModel.from_pretrained(backbone.model, run / RunFile.MASK)
    name = LAYER if LAYER in masked.sparsity() else min(masked.sparsity(), key=lambda each: masked.sparsity()[each])
    before, after = (dict(model.named_parameters())[name].detach() for model in (backbone.model, masked.view()))
    weights, effective = (part.flatten(1)[:ROWS, :COLUMNS] for part in (before, after))
    most = float(effective.abs().max())
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.1), layout="constrained")
    for axis, (title, part, colours) in zip(
        axes,
        (
            ("frozen weights W", weights, {"cmap": "RdBu_r", "vmin": -most, "vmax": most}),
            ("mask M: white is off", (effective != 0).float(), {"cmap": "Greys", "vmin": 0, "vmax": 1.4}),
            ("what runs: W * M / alpha", effective, {"cmap": "RdBu_r", "vmin": -most, "vmax": most}),
        ),
        strict=True,
    ):
        axis.imshow(part, aspect="auto", interpolation="nearest", **colours)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xticks([])
        axis.set_yticks([])
    figure.savefig(DOCS / "mask.png", dpi=120)


def draw_gate() -> None:
    """Held-out images, and one copy of each kind that the gate has them recognised from."""
    images = open_images("selfmask/fashion", split="test")
    clean = torch.stack([images[number] for number in (0, 11, 18)]).float() / 255
    generator = torch.Generator().manual_seed(0)
    columns = [clean, *(distort(clean, generator) for distort in DISTORTIONS)]
    figure, axes = plt.subplots(len(clean), len(columns), figsize=(9, 3.6), layout="constrained")
    for column, (title, part) in enumerate(zip(("image", *KINDS), columns, strict=True)):
        axes[0, column].set_title(title.replace(" or ", "\nor ").replace("g p", "g\np"), fontsize=9)
        for axis, image in zip(axes[:, column], part, strict=True):
            axis.imshow(image.permute(1, 2, 0))
            axis.axis("off")
    figure.savefig(DOCS / "gate.png", dpi=120)


def draw_whitening() -> None:
    """The share of the variance that each principal direction has, before and after."""
    backbone = load_backbone("selfmask/tiny")
    some = SomeImages(open_images("selfmask/fashion", split="train"), range(1000))
    vectors = embed(backbone.model.eval(), some, backbone.preprocessing)[0].double()
    spread = torch.linalg.svdvals(vectors - vectors.mean(0)).square() / len(vectors)
    figure, axis = plt.subplots(figsize=(6, 2.8), layout="constrained")
    for power, colour, title in (
        (0.0, GREY, "power 0: centred only"),
        (0.5, BLUE, "power 0.5: half whitened"),
        (1.0, ORANGE, "power 1: whitened"),
    ):
        axis.plot(_shares(spread, power)[:64], color=colour, label=title)
    axis.set_yscale("log")
    axis.set_xlabel("principal direction", fontsize=9)
    axis.set_ylabel("share of the variance", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=9, frameon=False)
    figure.savefig(DOCS / "whitening.png", dpi=120)


def _shares(variances: Tensor, power: float) -> Tensor:
    after = variances * scales(variances, power).square()
    return after / after.sum()


def main() -> None:
    torch.set_num_threads(1)
    draw_mask(Path(sys.argv[1]))
    draw_gate()
    draw_whitening()


if __name__ == "__main__":
    main()
