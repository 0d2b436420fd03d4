"""`selfmask cascade`: a dispatcher, a router and experts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from ..commands.adapt_config import PRESETS
from ..commands.cascade.config import CascadeConfig
from ..errors import ConfigError
from ..files import RunFile
from . import options
from .adapt import VIEW_SIZES
from .asking import Asked, ConfigOption, JsonOption, LearnNames, ResumeOption, ask, of_run
from .console import Console, print_json
from .launching import JobOption, Launch, LaunchOption, launch_jobs
from .options import Given, Verb

if TYPE_CHECKING:
    from ..commands.cascade.job import Job

_RUN = "run"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CascadeNames(LearnNames):
    """And the dispatcher that was given, if any, and how many experts are trained at a time."""

    dispatcher: Annotated[
        str | None,
        typer.Option(help="Run folder or mask file to use as the dispatcher, instead of adapting one."),
        Path,
    ] = None
    workers: Annotated[
        int,
        typer.Option(min=1, help="Number of experts to train at once, each in its own process.", show_default="1"),
    ] = 1


VERB = Verb(
    name="cascade",
    names=CascadeNames,
    config=CascadeConfig,
    start=lambda preset, _: CascadeConfig.preset(preset, track=()),
    presets=tuple(PRESETS),
    everyday=("experts", "steps", "epochs", "size", "batch_size", "seed", "gate", "router", "components", "scale"),
    not_options={
        **{f"adapt.{path}": why for path, why in VIEW_SIZES.items()},
        **dict.fromkeys(("adapt.method", "adapt.rank"), "a cascade is made of masks"),
    },
)


class _Cascade(TyperGroup):
    """`selfmask cascade DATA` is short for `selfmask cascade run DATA`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = [_RUN, *args]
        return super().parse_args(ctx, args)


Folder = Annotated[Path, typer.Argument(help="Folder of a cascade that was started.", show_default=False)]
Elsewhere = Annotated[
    str | None, typer.Option("--data", help="Location of the images on this machine.", show_default="as at the start")
]
Weights = Annotated[Path | None, typer.Option(help="File with the backbone's weights.")]


def command() -> typer.Typer:
    made = typer.Typer(
        cls=_Cascade,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode="rich",
        help="Learn one mask for all images, and an expert mask for each cluster of images.\n\nselfmask cascade "
        "DATA runs all of it; selfmask cascade run --help lists its options.",
    )
    made.command(_RUN)(options.command(VERB, run))
    made.command("expert")(expert)
    made.command("finish")(finish)
    return made


def run(
    out: Annotated[
        Path | None, typer.Option(help="Folder for the cascade.", show_default="runs/NAME-OF-IMAGES-cascade")
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Stop before training the experts, so that they can be trained elsewhere.")
    ] = False,
    launch: LaunchOption = None,
    job_option: JobOption = None,
    resume: ResumeOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    *,
    given: Given,
) -> None:
    """Adapt a dispatcher, divide the images into clusters, train an expert for each, and combine them.

    Writes cascade.smn, which `embed` and `evaluate` accept like a mask, and report.html. If it is stopped, the same
    command continues it to the same result.

    Examples:  selfmask cascade photos/ --backbone resnet50 --workers 4
    On several machines:  selfmask cascade photos/ --backbone resnet50 --launch slurm
    The same by hand:  selfmask cascade photos/ --out DIR --prepare
    selfmask cascade expert DIR --index 0   (and so on)
    selfmask cascade finish DIR
    """
    from ..commands.cascade.run import fit_cascade
    from ..commands.cascade.run import prepare as begin
    from .display import ConsoleStages

    asked = ask(VERB, given, out=out, resume=resume, config=config)
    console, start = Console(stderr=as_json), time.monotonic()
    where, first = asked.folder("-cascade"), asked.names.dispatcher
    job = _job(where, asked, console.say)
    display = ConsoleStages(console)
    if launch is not None:
        if prepare:
            raise ConfigError("--launch and --prepare exclude each other", todo="give one of them")
        _launch(job, first, launch, job_option, console)
        _show(console, where, as_json, time.monotonic() - start)
        return
    if prepare:
        begin(job, first, display)
        lines = [f"selfmask cascade expert {where} --index {k}" for k in job.missing]
        console.say(
            "prepared; now run these, on any machine and in any order:",
            *lines,
            "and then this:",
            f"selfmask cascade finish {where}",
        )
        return
    fit_cascade(
        job.model,
        job.images,
        job.config,
        out=where,
        dispatcher=first,
        preprocessing=job.preprocessing,
        about=job.about,
        max_bad=job.max_bad,
        workers=asked.names.workers,
        display=display,
    )
    _show(console, where, as_json, time.monotonic() - start)


def expert(
    folder: Folder,
    index: Annotated[int, typer.Option(help="Number of the expert, from 0.", show_default=False)],
    data: Elsewhere = None,
    weights: Weights = None,
) -> None:
    """Train a single expert; a scheduler can run all of them at once.

    Example:  selfmask cascade expert runs/photos-cascade --index 2
    """
    from ..commands.cascade.expert import train_expert
    from ..training import Processes
    from ..training.display import QuietDisplay
    from .display import ConsoleDisplay

    console = Console()
    display = ConsoleDisplay(console) if Processes().is_main else QuietDisplay()
    result = train_expert(_begun(folder, data, weights), index, display)
    if not Processes().is_main:
        return
    kept = {
        "mask": "better than the dispatcher, judged without labels",
        "start": "nothing better than the dispatcher was found",
    }
    console.say(f"expert {index}: {kept.get(result.get('kept', ''), 'trained')}, {result['seconds']:.0f} s")


def finish(folder: Folder, data: Elsewhere = None, weights: Weights = None, as_json: JsonOption = False) -> None:
    """Combine the experts into cascade.smn once all of them are trained.

    Example:  selfmask cascade finish runs/photos-cascade
    """
    from ..commands.cascade.run import collect
    from .display import ConsoleStages

    console, start = Console(stderr=as_json), time.monotonic()
    collect(_begun(folder, data, weights), ConsoleStages(console))
    _show(console, folder, as_json, time.monotonic() - start)


def _begun(folder: Path, data: str | None, weights: Path | None) -> Job:
    """The job that `selfmask cascade` was asked for; images and weights may be at another place on this machine."""
    asked = of_run(VERB, folder)
    names = dataclasses.replace(
        asked.names,
        images=asked.names.images if data is None else data,
        weights=asked.names.weights if weights is None else str(weights),
    )
    return _job(folder, dataclasses.replace(asked, names=names), lambda _: None)


def _job(folder: Path, asked: Asked[CascadeNames, CascadeConfig], say: Callable[[str], None]) -> Job:
    from ..backbones import load_backbone
    from ..commands.cascade.job import Job
    from ..data.partition import open_to_learn

    loaded = load_backbone(asked.backbone, weights=asked.weights)
    images, note = open_to_learn(asked.images, split=asked.names.split, max_pixels=asked.names.max_pixels)
    if note:
        say(note)
    about = asked.about  # all that the other commands need to know
    return Job(loaded.model, images, asked.config, folder, loaded.preprocessing, about, asked.names.max_bad)


def _launch(job: Job, first: str | None, engine: Launch, options: list[str] | None, console: Console) -> None:
    """Each stage as jobs: dispatcher and clusters, then the experts that are missing, then what combines them."""
    from ..commands.cascade.job import ROUTER, opened

    with opened(job, first):  # what contradicts the folder is refused here; from then on it says all there is to know
        place = str(job.folder)

    def run(*commands: list[str]) -> None:
        launch_jobs([["cascade", *words] for words in commands], engine, options, job.folder / RunFile.JOBS, console)

    if not (job.folder / ROUTER).exists():
        console.say("dispatcher and clusters")
        run([_RUN, "--resume", place, "--prepare"])
    if missing := job.missing:
        console.say(f"experts: {', '.join(map(str, missing))}")
        run(*(["expert", place, "--index", str(index)] for index in missing))
    if not all((job.folder / name).exists() for name in (RunFile.CASCADE, RunFile.RESULT)):
        console.say("combinations and report")
        run(["finish", place])


def _show(console: Console, folder: Path, as_json: bool, seconds: float) -> None:
    from ..training import RunFolder

    result = RunFolder.read_json(folder / RunFile.RESULT)
    if as_json:
        print_json(result)
        return
    paper = result["bytes"]["paper"]
    titles = {
        "float32": "float32 copies",
        "paper": "one bit per weight, as in the paper",
        "masks": "masks, coded",
        "router": "router",
        "conditional": "PCA, conditional",
        "unconditional": "PCA, unconditional",
        "file": "cascade.smn, total",
    }
    table = Table("", "bytes", "relative to the paper", title="Storage", title_justify="left")
    for name, title in titles.items():
        table.add_row(title, f"{result['bytes'][name]:,}", f"{result['bytes'][name] / paper:.2f}")
    console.print(table)
    improved = [kept == "mask" for kept in result["kept"][1:] if kept is not None]  # None: nothing was measured
    judged = f"{sum(improved)} of {len(improved)} experts are better than the dispatcher, judged without labels"
    console.say(
        f"{result['images']:,} images in clusters of {', '.join(f'{each:,}' for each in result['sizes'])}",
        *([judged] if improved else []),
        f"{seconds:.0f} s",
        f"cascade: {folder}/cascade.smn",
        f"report:  {folder}/report.html",
        f"measure it with labels: selfmask evaluate {folder} --data LABELLED",
    )
