"""`selfmask train`: masks learned from labels, and what they are compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..commands.train import PRESETS, TrainConfig
from ..errors import ConfigError, LabelsError
from ..files import RunFile
from . import options
from .adapt import VIEW_SIZES
from .asking import ConfigOption, JsonOption, LabelledNames, ResumeOption, ask
from .console import Console, print_json
from .options import Given, Verb

if TYPE_CHECKING:
    from ..objectives.heads import TextHead

_CLIP = "clip-text"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainNames(LabelledNames):
    """And what the texts of CLIP are made of."""

    class_names: Sequence[str] | None = None
    templates: Sequence[str] | None = None


VERB = Verb(
    name="train",
    names=TrainNames,
    config=TrainConfig,
    # What the paper did with CLIP is a preset of its own.
    start=lambda preset, given: TrainConfig.preset(preset, **({"head": _CLIP} if given.get("head") == _CLIP else {})),
    presets=tuple(PRESETS),
    everyday=("method", "head", "label_fraction", "stratified", "steps", "epochs", "size", "batch_size", "seed"),
    not_options=VIEW_SIZES,
)


def command() -> Callable[..., None]:
    return options.command(VERB, train)


def train(
    out: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/NAME-METHOD")] = None,
    classes: Annotated[
        Path | None,
        typer.Option(help="File of class names for clip-text, one per line, in the order of the class folders."),
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(help="Prompt template for clip-text, with {label} for the class name; may be repeated."),
    ] = None,
    resume: ResumeOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    *,
    given: Given,
) -> None:
    """Train with labels: a mask and its head in one small file, or a baseline.

    Test images (a folder test/, or a fifth of each class) are used only to measure accuracy, before and after training.
    For methods other than a mask, tuned.safetensors in the run folder holds the tensors that changed.

    Examples:  selfmask train birds/ --backbone resnet50 --label-fraction 0.05
    selfmask train birds/ --backbone open_clip/ViT-B-32 --head clip-text
    """
    from ..backbones import load_backbone
    from ..commands.train import train as run
    from ..data.class_names import read_class_names
    from ..data.partition import open_labelled
    from ..training import Processes
    from ..training.display import QuietDisplay
    from .display import ConsoleDisplay

    texts = {"class_names": None if classes is None else read_class_names(classes), "templates": template or None}
    asked = ask(VERB, given, out=out, resume=resume, config=config, **texts)
    chosen: TrainConfig = asked.config
    names = asked.names
    if chosen.head != _CLIP and (names.class_names or names.templates):
        raise ConfigError("class names and prompt templates need a CLIP text head", todo="add --head clip-text")
    is_main = Processes().is_main
    console = Console(stderr=as_json)
    labelled, test = open_labelled(asked.images, max_pixels=names.max_pixels)
    if labelled.note and is_main:
        console.say(labelled.note)
    loaded = load_backbone(asked.backbone, weights=asked.weights)
    text = None
    if chosen.head == _CLIP:
        text = _text_head(asked.backbone, asked.weights, labelled.classes or [], names)
    where = asked.folder(f"-{chosen.method}")
    result = run(
        loaded.model,
        labelled,
        chosen,
        test=test,
        head=text,
        out=where,
        resume=asked.resume,
        preprocessing=loaded.preprocessing,
        about=asked.about,
        max_bad=names.max_bad,
        display=ConsoleDisplay(console) if is_main else QuietDisplay(),
    )
    if is_main:
        if as_json:
            print_json(result.result)
        else:
            show(console, where, result.result)


def _text_head(backbone: str, weights: Path | None, own: list[str], names: TrainNames) -> TextHead:
    from ..backbones.text import PAPER, class_embeddings
    from ..objectives.heads import TextHead

    said = own if names.class_names is None else list(names.class_names)
    if len(said) != len(own):
        raise LabelsError(
            "the number of class names does not match the classes of these images",
            expected=f"{len(own)} names, for {', '.join(own[:5])}" + (", ..." if len(own) > 5 else ""),
            found=len(said),
        )
    text, scale = class_embeddings(backbone, said, names.templates or PAPER, weights=weights)
    return TextHead(text, scale, own)


def show(console: Console, folder: Path, result: dict[str, Any]) -> None:
    """The outcome as a small table, and where to look next."""
    start = "zero-shot" if result["head"] == "clip-text" else "frozen + linear probe"
    table = Table("", start, result["method"], title="Before and after", title_justify="left")
    if "accuracy" in result:
        table.add_row("test accuracy", f"{result['accuracy_before']:.1%}", f"{result['accuracy']:.1%}")
    table.add_row("bytes", f"{result['base_bytes']:,} (the backbone)", f"{result['bytes']:,}")
    console.print(table)
    file = RunFile.MASK if result["method"] == "mask" else RunFile.TUNED
    lines = [f"{result['labels']:,} labels, {result['steps']} steps, {result['seconds']:.0f} s"]
    if "active" in result:
        lines[0] = f"{result['active']:.2%} of the weights are active; {lines[0]}"
    lines += [f"file:   {folder}/{file}", f"report: {folder}/report.html"]
    console.say(*lines)
