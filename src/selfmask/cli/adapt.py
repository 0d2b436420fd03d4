"""`selfmask adapt`: the main job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..commands.adapt import PRESETS, AdaptConfig
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
    everyday=("steps", "epochs", "size", "batch_size", "seed", "gate"),
    not_options=VIEW_SIZES,
)


def command() -> Callable[..., None]:
    return options.command(VERB, adapt)


def adapt(
    out: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/NAME-OF-IMAGES")] = None,
    resume: ResumeOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    *,
    given: Given,
) -> None:
    """Adapt a backbone to unlabelled images by learning which of its weights to switch off.

    Writes mask.smn, report.html, result.json and a log to the run folder. Ctrl-C saves the run; --resume continues it
    to a bit-identical result. If nothing better than the frozen backbone was found, the mask leaves all weights on and
    the exit code is 3.

    Examples:  selfmask adapt photos/ --backbone resnet50
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
    )
    if is_main:
        if as_json:
            print_json(result.result)
        else:
            show(console, where, result.result)
    if result.helped is False and processes.count == 1:  # torchrun would take it for a crash
        raise typer.Exit(NOTHING_GAINED)


def show(console: Console, folder: Path, result: dict[str, Any]) -> None:
    """The outcome as a small table, and where to look next."""
    table = Table("", "frozen", "adapted", title="Before and after", title_justify="left")
    for name, label in (("knn", "k-NN accuracy"), ("probe", "linear probe, 1 % of labels")):
        if f"{name}_after" in result:
            table.add_row(label, *(f"{result[f'{name}_{side}']:.1%}" for side in ("before", "after")))
    if "quality_after" in result:
        table.add_row("quality (without labels)", *(f"{result[f'quality_{side}']:.3f}" for side in ("before", "after")))
    table.add_row("bytes", f"{result['base_bytes']:,}", f"{result['mask_bytes']:,} (the mask)")
    console.print(table)
    lines = [f"{result['active']:.2%} of the weights are active; {result['steps']} steps, {result['seconds']:.0f} s"]
    if result.get("kept") == "identity":
        lines.insert(0, "Nothing better than the frozen backbone was found: the mask leaves all weights on.")
    for trouble in result.get("troubles", ()):
        lines.append(f"step {trouble['step']}: {trouble['trouble']}; {trouble['answer']}")
    if result["bad_images"]:
        lines.append(f"{result['bad_images']} images could not be read: {folder}/bad_images.json")
    lines += [f"mask:   {folder}/mask.smn", f"report: {folder}/report.html"]
    console.say(*lines)
