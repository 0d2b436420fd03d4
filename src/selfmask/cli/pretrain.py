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

_TINY = "selfmask/tiny"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyNames(LearnNames):
    """There is one backbone, without weights yet, and no preset."""

    backbone: str | None = _TINY
    weights: str | None = None
    preset: str | None = None


VERB = Verb(
    name="pretrain",
    names=TinyNames,
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
    out: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/NAME-OF-IMAGES-tiny")] = None,
    resume: ResumeOption = None,
    config: ConfigOption = None,
    *,
    given: Given,
) -> None:
    """Train the network behind `selfmask/tiny` from random weights, with the training loop used for masks.

    Use the file it writes, tiny.safetensors, with --backbone selfmask/tiny --weights FILE.
    """
    from ..commands.pretrain import pretrain as run
    from .display import ConsoleDisplay

    asked = ask(VERB, given, out=out, resume=resume, config=config, backbone=_TINY)
    console = Console()
    file = run(
        asked.images,
        asked.folder("-tiny"),
        asked.config,
        resume=asked.resume,
        about=asked.about,
        max_bad=asked.names.max_bad,
        split=asked.names.split,
        max_pixels=asked.names.max_pixels,
        display=ConsoleDisplay(console),
    )
    console.say(f"weights: {file} ({file.stat().st_size:,} bytes)")
