"""`selfmask adapt`: the main job."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

NOTHING_GAINED = 3
"""Exit code of a run that ended well, but found nothing better than the frozen backbone."""


class Preset(StrEnum):
    fast = "fast"
    paper = "paper"
    reference = "reference"


def adapt(
    images: Annotated[
        str,
        typer.Argument(help="A folder, a list file, an .npz file or the name of a data set.", show_default=False),
    ],
    backbone: Annotated[str, typer.Option(help="Which backbone; see `selfmask backbones`.")] = "resnet50",
    out: Annotated[Path | None, typer.Option(help="The run folder.", show_default="runs/NAME-OF-IMAGES")] = None,
    preset: Annotated[
        Preset, typer.Option(help="fast helps in minutes; the others are the paper's text and its code.")
    ] = Preset.fast,
    steps: Annotated[
        int | None, typer.Option(help="How many steps.", show_default="fast: 120, else 150 epochs")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Or: how often every image is seen.")] = None,
    size: Annotated[int | None, typer.Option(help="Pixels a side.", show_default="the backbone's own")] = None,
    batch_size: Annotated[int, typer.Option(help="Images in a step, over all processes.")] = 64,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    gate: Annotated[
        bool | None,
        typer.Option(
            "--gate/--no-gate", help="Hold images out, and keep only what helps.", show_default="gate with fast"
        ),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="A file with the backbone's weights.")] = None,
    accumulate: Annotated[int, typer.Option(help="Cut a batch into so many parts, to need less memory.")] = 1,
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    compiled: Annotated[bool, typer.Option("--compile", help="Run the backbone through torch.compile.")] = False,
    sync_norm: Annotated[bool, typer.Option("--sync-norm", help="Batch norm over all processes.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, exactly.")] = False,
    max_bad: Annotated[float, typer.Option(help="Share of images that may be unreadable.")] = 0.05,
    track: Annotated[
        list[str] | None, typer.Option(help="tensorboard, wandb or mlflow.", show_default="tensorboard")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Adapt a backbone to your images, without labels: learn which of its weights to switch off.

    Leaves mask.smn, report.html, result.json and a log in the run folder. Ctrl-C saves; --resume goes on, to the bit.
    If nothing better than the frozen backbone was found, the mask changes nothing and the exit code is 3.

    Examples:  selfmask adapt photos/ --backbone resnet50
    torchrun --nproc-per-node 4 -m selfmask adapt photos/   (the same on four GPUs)
    """
    from ..backbones import load_backbone
    from ..commands.adapt import AdaptConfig
    from ..commands.adapt import adapt as run
    from ..training import Processes
    from ..training.display import ConsoleDisplay, QuietDisplay

    config = AdaptConfig.preset(
        preset.value,
        **{name: value for name, value in (("steps", steps), ("epochs", epochs), ("gate", gate)) if value is not None},
        **{"size": size, "batch_size": batch_size, "seed": seed},
        **{"accumulate": accumulate, "precision": precision, "compile": compiled, "sync_norm": sync_norm},
        track=tuple(track or ["tensorboard"]),
    )
    processes = Processes()
    is_main = processes.is_main
    console = Console(stderr=as_json)
    loaded = load_backbone(backbone, weights=weights)
    where = out or Path("runs") / Path(images).resolve().stem
    result = run(
        loaded.model,
        images,
        config,
        out=where,
        resume=resume,
        preprocessing=loaded.preprocessing,
        about={
            "backbone": loaded.name,
            "weights": None if weights is None else str(weights.resolve()),
            "images": images,
            "preset": preset.value,
        },
        max_bad=max_bad,
        display=ConsoleDisplay(console) if is_main else QuietDisplay(),
    )
    if is_main:
        if as_json:
            print(json.dumps(result.result, indent=2))
        else:
            show(console, where, result.result)
    if result.helped is False and processes.count == 1:  # torchrun would take it for a crash
        raise typer.Exit(NOTHING_GAINED)


def show(console: Console, folder: Path, result: dict[str, Any]) -> None:
    """The outcome as a small table, and where to look next."""
    table = Table("", "frozen", "adapted", title="Before and after", title_justify="left")
    for name, label in (("knn", "k-NN accuracy"), ("probe", "probe with 1 % of the labels")):
        if f"{name}_after" in result:
            table.add_row(label, *(f"{result[f'{name}_{side}']:.1%}" for side in ("before", "after")))
    if "quality_after" in result:
        table.add_row("quality (without labels)", *(f"{result[f'quality_{side}']:.3f}" for side in ("before", "after")))
    table.add_row("bytes", f"{result['base_bytes']:,}", f"{result['mask_bytes']:,} (the mask)")
    console.print(table)
    lines = [f"{result['active']:.2%} of the weights stay on; {result['steps']} steps, {result['seconds']:.0f} s"]
    if result.get("kept") == "identity":
        lines.insert(0, "Nothing better than the frozen backbone was found: the mask leaves all weights on.")
    for trouble in result.get("troubles", ()):
        lines.append(f"step {trouble['step']}: {trouble['trouble']}; {trouble['answer']}")
    if result["bad_images"]:
        lines.append(f"{result['bad_images']} images could not be read: {folder}/bad_images.json")
    lines += [f"mask:   {folder}/mask.smn", f"report: {folder}/report.html"]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
