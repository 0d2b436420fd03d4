"""`selfmask demo`: the main job on what comes with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import Console, print_json

BACKBONE, IMAGES = "selfmask/tiny", "selfmask/fashion"


def demo(
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/demo"),
    preset: Annotated[str, typer.Option(help="Settings to start from: fast, paper or reference.")] = "fast",
    steps: Annotated[int, typer.Option(help="Number of steps.")] = 960,
    seed: Annotated[int, typer.Option(help="Seed for all randomness.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Adapt a small network trained on CIFAR-10 to images of clothes, and measure the gain.

    Takes a few minutes and needs no internet connection. Labels are used only to measure the result. If it was stopped,
    it continues; if it is finished, it shows the result again (remove the folder to start over).
    """
    from ..backbones import load_backbone
    from ..commands.adapt import adapt
    from ..commands.adapt_config import AdaptConfig
    from ..commands.outcome import Labelled
    from ..data import open_images
    from .adapt import show
    from .display import ConsoleDisplay

    console = Console(stderr=as_json)
    backbone = load_backbone(BACKBONE)
    console.say(f"backbone {BACKBONE}, images {IMAGES}")
    train, test = (open_images(IMAGES, split=split) for split in ("train", "test"))
    result = adapt(
        backbone.model,
        train,
        AdaptConfig.preset(preset, steps=steps, seed=seed),
        out=out,
        resume=True,
        preprocessing=backbone.preprocessing,
        about={"backbone": BACKBONE, "images": IMAGES, "weights": None, "preset": preset},
        labelled=Labelled(train, test),
        display=ConsoleDisplay(console),
    ).result
    if as_json:
        print_json(result)
    else:
        show(console, out, result)
