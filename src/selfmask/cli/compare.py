"""`selfmask compare`: methods side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..commands.compare import APART, GROWING, CompareConfig
from ..commands.train import PRESETS
from . import options
from .adapt import VIEW_SIZES
from .asking import ConfigOption, JsonOption, LabelledNames, ResumeOption, ask
from .console import Console, print_json
from .options import Given, Verb

_CELL = "each cell has its own"
VERB = Verb(
    name="compare",
    names=LabelledNames,
    config=CompareConfig,
    start=lambda preset, _: CompareConfig.preset(preset),
    presets=tuple(PRESETS),
    everyday=(*GROWING, "stratified", "steps", "adapt_steps", "size", "batch_size"),
    not_options={
        **dict.fromkeys(("train.method", "train.label_fraction", "train.seed", "adapt.seed"), _CELL),
        "train.head": "methods are compared with the same head",
        **{f"{part}.{path}": why for part in ("train", "adapt") for path, why in VIEW_SIZES.items()},
    },
    together=("train", "adapt"),
    apart=APART,
    free=GROWING,
)


def command() -> Callable[..., None]:
    return options.command(VERB, compare)


def compare(
    out: Annotated[
        Path | None, typer.Option(help="Folder for all runs.", show_default="runs/NAME-OF-IMAGES-compare")
    ] = None,
    resume: ResumeOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    *,
    given: Given,
) -> None:
    """Compare masks with fine-tuning, linear heads, LoRA and BitFit: accuracy against labels and bytes.

    If it is stopped, the same command continues it; methods, shares of labels and seeds can be added later. Writes
    compare.json, compare.md and compare.png. Settings apply to all runs, except that --steps, --epochs and --lr are for
    runs with labels, and --adapt-steps, --adapt-epochs and --adapt-lr for self-mask.

    Example:  selfmask compare birds/ --backbone resnet50 --methods frozen,self-mask,full
    """
    from ..backbones import load_backbone
    from ..commands.compare import compare as run
    from ..data.partition import open_labelled
    from ..errors import RunWriteError
    from ..files import write_atomically
    from ..report.comparison import as_dict, draw, head, markdown, rows
    from .display import ConsoleStages

    asked = ask(VERB, given, out=out, resume=resume, config=config)
    console = Console(stderr=as_json)
    labelled, test = open_labelled(asked.images, max_pixels=asked.names.max_pixels)
    where = asked.folder("-compare")
    comparison = run(
        lambda: load_backbone(asked.backbone, weights=asked.weights),
        labelled,
        test,
        asked.config,
        out=where,
        about=asked.about,
        max_bad=asked.names.max_bad,
        display=ConsoleStages(console),
    )
    write_atomically(where / "compare.json", json.dumps(as_dict(comparison), indent=2).encode(), RunWriteError)
    write_atomically(where / "compare.md", markdown(comparison).encode(), RunWriteError)
    draw(comparison, where / "compare.png")
    if as_json:
        print_json(as_dict(comparison))
        return
    table = Table(*head(comparison), title="Accuracy by share of labels", title_justify="left")
    for row in rows(comparison):
        table.add_row(*row)
    console.print(table)
    console.say(f"{where}/compare.png, compare.md, compare.json")
