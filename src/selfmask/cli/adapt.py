"""`selfmask adapt`: the main job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..commands.adapt_config import PRESETS, AdaptConfig
from ..errors import HubError
from ..evaluation.rows import as_table
from ..files import RunFile
from . import options
from .asking import ConfigOption, JsonOption, LearnNames, ResumeOption, ask
from .console import Console, print_json
from .options import Given, Verb

NOTHING_GAINED = 3
"""Exit code of a run that ended well, but found nothing better than the frozen backbone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptNames(LearnNames):
    """And what the run begins with."""

    start: Annotated[
        str | None,
        typer.Option(
            metavar="MASK",
            help="Mask to start from, where new images arrived: a run folder, which also has scores and heads, or a "
            "mask file (.smn). If nothing better is found, it is the result.",
        ),
        Path,
    ] = None


VIEW_SIZES = {
    "views.size": "the size of a run is --size; here it only sets the ratio of small crops to large ones",
    "views.small_size": "see views.size; a config file can change the ratio",
}
VERB = Verb(
    name="adapt",
    names=AdaptNames,
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
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Share the mask on the hub at the end, if it gained. Credentials are checked before the run.",
            rich_help_panel="Sharing",
        ),
    ] = None,
    licence: Annotated[str | None, typer.Option(help="As in `selfmask push`.", rich_help_panel="Sharing")] = None,
    data_name: Annotated[str | None, typer.Option(help="As in `selfmask push`.", rich_help_panel="Sharing")] = None,
    public: Annotated[bool, typer.Option("--public", help="As in `selfmask push`.", rich_help_panel="Sharing")] = False,
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
    from ..training.start import Start
    from .display import ConsoleDisplay

    asked = ask(VERB, _with_backbone(given), out=out, resume=resume, config=config)
    start = None if asked.names.start is None else Start.of(asked.names.start)
    where = asked.folder()
    processes = Processes()
    is_main = processes.is_main
    console = Console(stderr=as_json)
    if push is not None and is_main:
        from ..hub.transfer import check_access

        check_access(push)
    loaded = load_backbone(asked.backbone, weights=asked.weights)
    result = run(
        loaded.model,
        asked.images,
        asked.config,
        out=where,
        resume=asked.resume,
        preprocessing=loaded.preprocessing if start is None else None,  # a mask says how images are prepared for it
        about=asked.about,
        max_bad=asked.names.max_bad,
        split=asked.names.split,
        max_pixels=asked.names.max_pixels,
        start=start,
        display=ConsoleDisplay(console) if is_main else QuietDisplay(),
        dry_run=dry_run,
    )
    if is_main:
        if push is not None and not dry_run:
            _share(console, where, push, result.helped, licence=licence, data=data_name, private=not public)
        if as_json:
            print_json(result.result)
        elif dry_run:
            show_plan(console, result.result)
        else:
            show(console, where, result.result)
    if result.helped is False and processes.count == 1:  # torchrun would take it for a crash
        raise typer.Exit(NOTHING_GAINED)


def _with_backbone(given: Given) -> Given:
    """A mask names its backbone, if the user does not: one that is here, since a file is not to say what is fetched."""
    from ..backbones import at_hand
    from ..training.start import Start

    if given.names.get("start") is None or given.names.get("backbone") is not None:
        return given
    name = Start.of(given.names["start"]).base_name
    weights = given.names.get("weights")
    if name is None or not at_hand(name, weights):
        return given
    return dataclasses.replace(given, names={**given.names, "backbone": name})


def _share(console: Console, folder: Path, repo: str, helped: bool | None, **words: Any) -> None:
    """To the hub; what changes nothing is of no use to anybody."""
    from ..commands.push import push

    if helped is False:
        console.say(f"not pushed, since nothing was gained; to share it anyway: selfmask push {folder} {repo}")
        return
    try:
        console.say(f"pushed: {push(folder, repo, **words)}")
    except HubError as error:  # the run itself is done and kept
        raise type(error)(
            error.what,
            expected=error.expected,
            found=error.found,
            todo=f"{error.todo or 'try again'}; the run is finished: selfmask push {folder} {repo}",
        ) from error


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
    if result.get("kept") == "start":
        lines.insert(0, "Nothing better than the mask that the run started from was found: that is the result.")
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
