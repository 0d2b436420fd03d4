"""`selfmask train`: masks learned from labels, and what they are compared with."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..files import RunFile

if TYPE_CHECKING:
    from ..objectives.heads import TextHead


class Method(StrEnum):
    mask = "mask"
    full = "full"
    linear = "linear"
    lora = "lora"
    bitfit = "bitfit"


class HeadKind(StrEnum):
    linear = "linear"
    masked = "masked"
    clip_text = "clip-text"


class Preset(StrEnum):
    fast = "fast"
    paper = "paper"


LabelledData = Annotated[
    str,
    typer.Argument(
        help="Labelled images: a folder with a folder for each class, or the name of a data set.", show_default=False
    ),
]


def train(
    data: LabelledData,
    backbone: Annotated[str, typer.Option(help="Which backbone; see `selfmask backbones`.")] = "resnet50",
    method: Annotated[
        Method, typer.Option(help="What learns: a mask, all weights, only the head, LoRA, or biases and norms.")
    ] = Method.mask,
    head: Annotated[
        HeadKind, typer.Option(help="linear: trained; masked: random and masked; clip-text: from class names.")
    ] = HeadKind.linear,
    label_fraction: Annotated[float, typer.Option(help="Which share of the labels to use.")] = 1.0,
    stratified: Annotated[
        bool, typer.Option("--stratified/--uniform", help="That share of each class, or of all images as they come.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="The run folder.", show_default="runs/NAME-METHOD")] = None,
    preset: Annotated[Preset, typer.Option(help="fast takes minutes; paper is the paper's.")] = Preset.fast,
    steps: Annotated[int | None, typer.Option(help="How many steps.", show_default="fast: 300")] = None,
    epochs: Annotated[float | None, typer.Option(help="Or: how often every image is seen.")] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate.", show_default="by method")] = None,
    rank: Annotated[int, typer.Option(help="Of LoRA's matrices.")] = 8,
    size: Annotated[int | None, typer.Option(help="Pixels a side.", show_default="the backbone's own")] = None,
    batch_size: Annotated[int, typer.Option(help="Images in a step, over all processes.")] = 64,
    seed: Annotated[int, typer.Option(help="Of everything random, the choice of labels included.")] = 0,
    classes: Annotated[
        Path | None, typer.Option(help="Names for clip-text, one a line in the order of the class folders.")
    ] = None,
    template: Annotated[
        list[str] | None, typer.Option(help="A prompt for clip-text, with {label}; may be given several times.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="A file with the backbone's weights.")] = None,
    accumulate: Annotated[int, typer.Option(help="Cut a batch into so many parts, to need less memory.")] = 1,
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, exactly.")] = False,
    max_bad: Annotated[float, typer.Option(help="Share of images that may be unreadable.")] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train with labels: a mask and its head in one small file, or what you would do instead.

    Test images (a folder test/, or a fifth of each class) are only measured with: before, and after. For other methods
    than a mask, the run folder has tuned.safetensors with the tensors that changed.

    Examples:  selfmask train birds/ --backbone resnet50 --label-fraction 0.05
    selfmask train birds/ --backbone open_clip/ViT-B-32 --head clip-text
    """
    from ..backbones import load_backbone
    from ..commands.train import TrainConfig
    from ..commands.train import train as run
    from ..data.partition import open_labelled
    from ..errors import ConfigError
    from ..training import Processes
    from ..training.display import ConsoleDisplay, QuietDisplay

    if head is not HeadKind.clip_text and (classes or template):
        raise ConfigError("class names and templates are for CLIP's texts", todo="add --head clip-text")
    given = {"steps": steps, "epochs": epochs, "lr": lr}
    config = TrainConfig.preset(
        preset.value,
        **{name: value for name, value in given.items() if value is not None},
        **{"method": method.value, "head": head.value, "label_fraction": label_fraction, "stratified": stratified},
        **{"rank": rank, "size": size, "batch_size": batch_size, "seed": seed},
        **{"accumulate": accumulate, "precision": precision},
    )
    is_main = Processes().is_main
    console = Console(stderr=as_json)
    images, test = open_labelled(data)
    loaded = load_backbone(backbone, weights=weights)
    text = None
    if head is HeadKind.clip_text:
        text = _text_head(backbone, weights, images.classes or [], classes, template)
    where = out or Path("runs") / f"{Path(data).resolve().stem}-{method.value}"
    result = run(
        *(loaded.model, images, config),
        test=test,
        head=text,
        out=where,
        resume=resume,
        preprocessing=loaded.preprocessing,
        about={
            **{"backbone": loaded.name, "weights": None if weights is None else str(weights.resolve())},
            **{"images": data, "preset": preset.value},
        },
        max_bad=max_bad,
        display=ConsoleDisplay(console) if is_main else QuietDisplay(),
    )
    if is_main:
        if as_json:
            print(json.dumps(result.result, indent=2))
        else:
            show(console, where, result.result)


def _text_head(
    backbone: str, weights: Path | None, own: list[str], names: Path | None, templates: list[str] | None
) -> TextHead:
    from ..backbones.text import PAPER, class_embeddings
    from ..data.class_names import read_class_names
    from ..errors import LabelsError
    from ..objectives.heads import TextHead

    said = own if names is None else read_class_names(names)
    if len(said) != len(own):
        raise LabelsError(
            f"{names} does not name the classes of these images",
            expected=f"{len(own)} names, for {', '.join(own[:5])}" + (", ..." if len(own) > 5 else ""),
            found=len(said),
        )
    text, scale = class_embeddings(backbone, said, templates or PAPER, weights=weights)
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
        lines[0] = f"{result['active']:.2%} of the weights stay on; {lines[0]}"
    lines += [f"file:   {folder}/{file}", f"report: {folder}/report.html"]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
