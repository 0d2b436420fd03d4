"""`selfmask compare`: methods side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..commands.compare import APART, GROWING, CompareConfig
from ..commands.train import PRESETS
from ..errors import ConfigError
from . import options
from .adapt import VIEW_SIZES
from .asking import ConfigOption, JsonOption, LabelledNames, ResumeOption, ask
from .console import Console, print_json
from .options import Given, Verb

if TYPE_CHECKING:
    from ..backbones import Backbone
    from ..data import Images

_CELL = "each cell has its own"
VERB = Verb(
    name="compare",
    names=LabelledNames,
    config=CompareConfig,
    start=lambda preset, _: CompareConfig.preset(preset),
    presets=tuple(PRESETS),
    everyday=("labels", *GROWING, "stratified", "steps", "adapt_steps", "size", "batch_size"),
    not_options={
        **dict.fromkeys(("train.method", "train.label_fraction", "train.seed", "adapt.method", "adapt.seed"), _CELL),
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

    With --no-labels, nothing learns from labels: all methods learn as `selfmask adapt` does, and labels, if there are
    any, only measure. If it is stopped, the same command continues it; methods, shares of labels and seeds can be added
    later. Writes compare.json, compare.md and, with labels, compare.png. Settings apply to all runs, except that
    --steps, --epochs and --lr are for runs with labels, and --adapt-steps and --adapt-epochs for those without
    (--adapt-lr is the mask's; other methods have rates of their own).

    Examples:  selfmask compare birds/ --backbone resnet50 --methods frozen,self-mask,full
    selfmask compare photos/ --backbone resnet50 --no-labels --methods frozen,adabn,mask,full
    """
    from ..backbones import load_backbone
    from ..commands import compare as comparing
    from ..data.partition import open_labelled, open_to_measure
    from ..errors import RunWriteError
    from ..files import write_atomically
    from ..report import comparison as with_labels
    from ..report import rivals as without_labels
    from .display import ConsoleStages

    asked = ask(VERB, given, out=out, resume=resume, config=config)
    chosen: CompareConfig = asked.config
    console, pixels, where = Console(stderr=as_json), asked.names.max_pixels, asked.folder("-compare")
    options: dict[str, Any] = {"out": where, "about": asked.about, "max_bad": asked.names.max_bad}
    options |= {"display": ConsoleStages(console)}

    def load() -> Backbone:
        return load_backbone(asked.backbone, weights=asked.weights)

    made: Any = with_labels if chosen.labels else without_labels
    if chosen.labels:
        title, both = "Accuracy by share of labels", open_labelled(asked.images, max_pixels=pixels)
        _say_split(console, both[0])
        found: Any = comparing.compare(load, *both, chosen, **options)
        with_labels.draw(found, where / "compare.png")
    else:
        _refuse_labelled(given)
        title, (learned, tested) = "Learned without labels", open_to_measure(asked.images, max_pixels=pixels)
        _say_split(console, learned)
        found = comparing.compare_rivals(load, learned, tested, chosen, **options)
    write_atomically(where / "compare.json", json.dumps(made.as_dict(found), indent=2).encode(), RunWriteError)
    write_atomically(where / "compare.md", made.markdown(found).encode(), RunWriteError)
    if as_json:
        print_json(made.as_dict(found))
        return
    table = Table(*made.head(found), title=title, title_justify="left")
    for row in made.rows(found):
        table.add_row(*row)
    console.print(table)
    for note in with_labels.notes(found) if chosen.labels else ():
        console.say(note)
    console.say(f"{where}/compare.md, compare.json" + (", compare.png" if chosen.labels else ""))


def _say_split(console: Console, images: Images) -> None:
    if images.note:
        console.say(images.note)


def _refuse_labelled(given: Given) -> None:
    """Settings of runs with labels would have no effect, and are no slip of the finger to be passed over."""
    wrong = [given.marks[path] for path in given.marks if path[-1] in APART and path[0] == "train"]
    wrong += [given.marks[path] for path in given.marks if path == ("label_fractions",)]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} is for runs with labels",
            todo="omit it; runs without labels have --adapt-steps and --adapt-epochs",
        )
