"""`selfmask pretrain`: train the bundled tiny backbone from nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..commands.pretrain import PretrainConfig
from ..masking import MaskConfig
from ..settings import hints_of
from . import options
from .asking import ConfigOption, ImagesArgument, MaxBadOption, Names, ResumeOption, ask
from .options import Given, Verb

VERB = Verb(
    name="pretrain",
    config=PretrainConfig,
    start=lambda *_: PretrainConfig(),
    everyday=("labels", "epochs", "steps", "batch_size", "lr", "seed"),
    not_options={
        **{f"mask.{name}": "all weights learn, and none is masked" for name in hints_of(MaskConfig)},
        "per_tensor": "it is for the scores of a mask",
        "size": "the network is made for images of 32 pixels a side",
        "head_lr": "heads learn as fast as weights",
    },
)


def command() -> Callable[..., None]:
    return options.command(VERB, pretrain)


def pretrain(
    images: ImagesArgument = None,
    out: Annotated[Path | None, typer.Option(help="The run folder.", show_default="runs/NAME-OF-IMAGES-tiny")] = None,
    resume: ResumeOption = None,
    config: ConfigOption = None,
    max_bad: MaxBadOption = None,
    *,
    settings: Given,
) -> None:
    """Train the network behind `selfmask/tiny` from random weights, with the loop that adapts masks.

    The file it writes, tiny.safetensors, can be used with: --backbone selfmask/tiny --weights FILE.
    """
    from ..commands.pretrain import pretrain as run
    from .display import ConsoleDisplay

    given = {"images": images, "max_bad": max_bad, "backbone": "selfmask/tiny"}
    asked = ask(VERB, Names, given, settings, out=out, resume=resume, config=config)
    console = Console()
    file = run(
        asked.images,
        asked.folder("-tiny"),
        asked.config,
        resume=asked.resume,
        about=asked.about,
        max_bad=asked.names.max_bad,
        display=ConsoleDisplay(console),
    )
    console.print(f"weights in {file} ({file.stat().st_size:,} bytes)", highlight=False, markup=False, soft_wrap=True)
