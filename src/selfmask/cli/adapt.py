"""`selfmask adapt`: the main job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..commands.adapt_config import PRESETS, AdaptConfig
from ..evaluation.rows import as_table
from ..files import RunFile
from . import options
from .asking import ConfigOption, JsonOption, LearnNames, ResumeOption, ask
from .console import Console, print_json
from .options import Given, Verb

NOTHING_GAINED = 3
"""Exit code of a run that ended well, but found nothing better than the frozen backbone."""

VIEW_SIZES = {
    "views.size": "the size of a run is --size; here it only sets the ratio of small crops to large ones",
    "views.small_size": "see views.size; a config file can change the ratio",
}
VERB = Verb(
    name="adapt",
    names=LearnNames,
    config=AdaptConfig,
    start=lambda preset, _: AdaptConfig.preset(preset),
    presets=tuple(PRESETS),
    everyday=("method", "budget", "steps", "epochs", "size", "batch_size", "seed", "gate"),
    not_options=VIEW_SIZES,
)


def command() -> Callable[..., None]:
    return options.command(VERB, adapt)


def adapt(
    out: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/NAME-OF-IMAGES")] = None,
    resume: ResumeOption = None,
    config: ConfigOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Take a few steps, print what the run would take, and write nothing.")
    ] = False,
    as_json: JsonOption = False,
    *,
    given: Given,
) -> None:
    """Adapt a backbone to unlabelled images by learning which of its weights to switch off.

    Writes mask.smn, map.safetensors, report.html, result.json and a log to the run folder. Ctrl-C saves the run;
    --resume continues it to a bit-identical result. If nothing better than the frozen backbone was found, the mask
    leaves all weights on and the exit code is 3. Other methods train weights instead, without labels too, and write
    tuned.safetensors.

    Examples:  selfmask adapt photos/ --backbone resnet50 --budget 20m
    selfmask adapt --resume runs/photos
    torchrun --nproc-per-node 4 -m selfmask adapt photos/   (on four GPUs)
    """
    from ..backbones import load_backbone
    from ..commands.adapt import adapt as run
    from ..training import Processes
    from ..training.display import QuietDisplay
    from .display import ConsoleDisplay

    asked = ask(VERB, given, out=out, resume=resume, config=config)
    where = asked.folder()
    processes = Processes()
    is_main = processes.is_main
    console = Console(stderr=as_json)
    loaded = load_backbone(asked.backbone, weights=asked.weights)
    result = run(
        loaded.model,
        asked.images,
        asked.config,
        out=where,
        resume=asked.resume,
        preprocessing=loaded.preprocessing,
        about=asked.about,
        max_bad=asked.names.max_bad,
        split=asked.names.split,
        max_pixels=asked.names.max_pixels,
        display=ConsoleDisplay(console) if is_main else QuietDisplay(),
        dry_run=dry_run,
    )
    if is_main:
        if as_json:
            print_json(result.result)
        elif dry_run:
            show_plan(console, result.result)
        else:
            show(console, where, result.result)
    if result.helped is False and processes.count == 1:  # torchrun would take it for a crash
        raise typer.Exit(NOTHING_GAINED)


def show_plan(console: Console, plan: dict[str, Any]) -> None:
    """What a run would take."""
    from ..training.display import duration

    memory, disk = (plan[f"{what}_bytes"] / 1e6 for what in ("memory", "disk"))
    console.say(f"{plan['steps']:,} steps, about {duration(plan['seconds'])}")
    console.say(f"{memory:,.0f} MB of memory, {disk:,.0f} MB of disk for checkpoints")


def show(console: Console, folder: Path, result: dict[str, Any]) -> None:
    """The outcome as small tables, and where to look next."""
    if "rows" in result:
        head, *rows = as_table(result["rows"])
        accuracies = Table(*head, title="Accuracy", title_justify="left")
        for row in rows:
            accuracies.add_row(*row)
        console.print(accuracies)
    table = Table("", "frozen", "adapted", title="Before and after", title_justify="left")
    if "quality_after" in result:
        table.add_row("quality (without labels)", *(f"{result[f'quality_{side}']:.3f}" for side in ("before", "after")))
    method, is_mask = result["method"], "mask_bytes" in result
    size = f"{result['mask_bytes']:,} (the mask)" if is_mask else f"{result['bytes']:,} ({method})"
    table.add_row("bytes", f"{result['base_bytes']:,}", size)
    console.print(table)
    lines = [f"{result['steps']} steps, {result['seconds']:.0f} s"]
    if is_mask:
        lines[0] = f"{result['active']:.2%} of the weights are active; {lines[0]}"
    if result.get("kept") == "identity":
        what = "the mask leaves all weights on" if is_mask else "the file changes nothing in it"
        lines.insert(0, f"Nothing better than the frozen backbone was found: {what}.")
    for trouble in result.get("troubles", ()):
        lines.append(f"step {trouble['step']}: {trouble['trouble']}; {trouble['answer']}")
    if result["bad_images"]:
        lines.append(f"{result['bad_images']} images could not be read: {folder}/bad_images.json")
    if result.get("map_bytes"):
        lines.append(f"map:    {folder}/{RunFile.MAP} (to whiten vectors: selfmask embed --whiten auto)")
    file = RunFile.MASK if is_mask else RunFile.TUNED
    lines += [f"{'mask' if is_mask else 'file'}:   {folder}/{file}", f"report: {folder}/report.html"]
    console.say(*lines)
