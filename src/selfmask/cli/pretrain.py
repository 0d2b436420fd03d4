"""`selfmask pretrain`: train the bundled tiny backbone from nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..commands.pretrain import PretrainConfig
from ..masking import MaskConfig
from ..settings import hints_of
from . import options
from .asking import ConfigOption, LearnNames, ResumeOption, ask
from .console import Console
from .options import Given, Verb


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainNames(LearnNames):
    """The backbone follows from the settings, has no weights yet, and there is no preset."""

    backbone: str | None = None
    features: str | None = None
    weights: str | None = None
    preset: str | None = None


VERB = Verb(
    name="pretrain",
    names=PretrainNames,
    config=PretrainConfig,
    start=lambda *_: PretrainConfig(),
    everyday=("network", "labels", "epochs", "steps", "batch_size", "lr", "seed"),
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
    out: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/NAME-OF-IMAGES-NETWORK")] = None,
    resume: ResumeOption = None,
    config: ConfigOption = None,
    *,
    given: Given,
) -> None:
    """Train a network of this package from random weights, with the training loop used for masks.

    Use the file it writes with its name: --backbone selfmask/tiny --weights tiny.safetensors, or --backbone
    selfmask/vit --weights vit.safetensors.
    """
    from ..commands.pretrain import pretrain as run
    from .display import ConsoleDisplay

    asked = ask(VERB, given, out=out, resume=resume, config=config)
    console = Console()
    file = run(
        asked.images,
        asked.folder(f"-{asked.config.network}"),
        asked.config,
        resume=asked.resume,
        about=asked.about,
        max_bad=asked.names.max_bad,
        split=asked.names.split,
        max_pixels=asked.names.max_pixels,
        display=ConsoleDisplay(console),
    )
    console.say(f"weights: {file} ({file.stat().st_size:,} bytes)")
