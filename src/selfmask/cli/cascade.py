"""`selfmask cascade`: a dispatcher, a router and experts."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from ..files import RunFile
from .adapt import Preset
from .embed import Scale

if TYPE_CHECKING:
    from ..commands.cascade.job import Job

_CONFIG = RunFile.CONFIG
_RUN = "run"


class _Cascade(TyperGroup):
    """`selfmask cascade DATA` is short for `selfmask cascade run DATA`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = [_RUN, *args]
        return super().parse_args(ctx, args)


cascade = typer.Typer(
    cls=_Cascade,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="One mask for all images, and an expert's for each cluster of them.\n\nselfmask cascade DATA does all of it; "
    "selfmask cascade run --help has its options.",
)


class Router(StrEnum):
    gmm = "gmm"
    kmeans = "kmeans"


Folder = Annotated[Path, typer.Argument(help="The folder of a cascade that was begun.", show_default=False)]
Elsewhere = Annotated[
    str | None, typer.Option("--data", help="Where the images are here.", show_default="as when it was begun")
]
Weights = Annotated[Path | None, typer.Option(help="A file with the backbone's weights.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


@cascade.command(_RUN)
def run(
    data: Annotated[
        str, typer.Argument(help="A folder, a list file, an .npz file or the name of a data set.", show_default=False)
    ],
    backbone: Annotated[str, typer.Option(help="Which backbone; see `selfmask backbones`.")] = "resnet50",
    experts: Annotated[int, typer.Option(help="How many clusters, and a mask for each.")] = 5,
    dispatcher: Annotated[
        Path | None, typer.Option(help="A run folder or a mask file to take, instead of adapting one.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where all of it goes.", show_default="runs/NAME-OF-IMAGES-cascade")
    ] = None,
    preset: Annotated[Preset, typer.Option(help="Of all adaptations, as in `selfmask adapt`.")] = Preset.fast,
    steps: Annotated[
        int | None, typer.Option(help="Of the dispatcher and of each expert.", show_default="fast: 120")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Or: of the dispatcher; experts take as many steps.")] = None,
    size: Annotated[int | None, typer.Option(help="Pixels a side.", show_default="the backbone's own")] = None,
    batch_size: Annotated[int, typer.Option(help="Images in a step.")] = 64,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    router: Annotated[Router, typer.Option(help="A Gaussian mixture, or k-means.")] = Router.gmm,
    components: Annotated[int, typer.Option(help="Principal components that the router looks at.")] = 20,
    scale: Annotated[
        Scale, typer.Option(help="Of combined vectors: unit variance, as it is, or by eigenvalues.")
    ] = Scale.whiten,
    workers: Annotated[int, typer.Option(min=1, help="Experts trained at a time, a process each.")] = 1,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Stop before the experts, to train them elsewhere.")
    ] = False,
    weights: Weights = None,
    max_bad: Annotated[float, typer.Option(help="Share of images that may be unreadable.")] = 0.05,
    as_json: Json = False,
) -> None:
    """Adapt a dispatcher, part the images into clusters, train an expert for each, and combine them.

    Leaves cascade.smn, which `embed` and `evaluate` take like a mask, and report.html. Stopped at any moment, the same
    command goes on where it was, to the same result.

    Examples:  selfmask cascade photos/ --backbone resnet50 --workers 4
    On many machines:  selfmask cascade photos/ --out DIR --prepare;  selfmask cascade expert DIR --index 0  and so on;
    selfmask cascade finish DIR
    """
    from ..commands.cascade import fit_cascade
    from ..commands.cascade.run import prepare as begin
    from ..training.stages import StagesDisplay

    given = {"steps": steps, "epochs": epochs}
    where = out or Path("runs") / f"{Path(data).resolve().stem}-cascade"
    asked = {
        **{"images": data, "backbone": backbone, "weights": None if weights is None else str(weights.resolve())},
        **{"preset": preset.value, "max_bad": max_bad},
        "settings": {
            **{name: value for name, value in given.items() if value is not None},
            **{"experts": experts, "router": router.value, "components": components, "scale": scale.value},
            **{"size": size, "batch_size": batch_size, "seed": seed},
        },
    }
    console, start = Console(stderr=as_json), time.monotonic()
    job = _job(where, asked)
    display = StagesDisplay(console)
    if prepare:
        begin(job, dispatcher, display)
        lines = [f"selfmask cascade expert {where} --index {k}" for k in job.missing]
        _say(console, "prepared; now, anywhere, in any order:", *lines, "and then:", f"selfmask cascade finish {where}")
        return
    fit_cascade(
        *(job.model, job.images, job.config),
        out=where,
        dispatcher=dispatcher,
        preprocessing=job.preprocessing,
        about=job.about,
        max_bad=max_bad,
        workers=workers,
        display=display,
    )
    _show(console, where, as_json, time.monotonic() - start)


@cascade.command("expert")
def expert(
    folder: Folder,
    index: Annotated[int, typer.Option(help="Which expert, from 0 on.", show_default=False)],
    data: Elsewhere = None,
    weights: Weights = None,
) -> None:
    """Train one expert, and no other; a scheduler can run all of them at once.

    Example:  selfmask cascade expert runs/photos-cascade --index 2
    """
    from ..commands.cascade.expert import train_expert
    from ..training import Processes
    from ..training.display import ConsoleDisplay, QuietDisplay

    console = Console()
    display = ConsoleDisplay(console) if Processes().is_main else QuietDisplay()
    result = train_expert(_job(folder, _asked(folder, data, weights)), index, display)
    if not Processes().is_main:
        return
    kept = {"mask": "better than the dispatcher, without labels", "start": "nothing better than the dispatcher found"}
    _say(console, f"expert {index}: {kept.get(result.get('kept', ''), 'trained')}, {result['seconds']:.0f} s")


@cascade.command("finish")
def finish(folder: Folder, data: Elsewhere = None, weights: Weights = None, as_json: Json = False) -> None:
    """Collect the experts into cascade.smn, once all are trained.

    Example:  selfmask cascade finish runs/photos-cascade
    """
    from ..commands.cascade.run import collect
    from ..training.stages import StagesDisplay

    console, start = Console(stderr=as_json), time.monotonic()
    collect(_job(folder, _asked(folder, data, weights)), StagesDisplay(console))
    _show(console, folder, as_json, time.monotonic() - start)


def _asked(folder: Path, data: str | None, weights: Path | None) -> dict[str, Any]:
    """What `selfmask cascade` was asked for; images and weights may be at another place on this machine."""
    from ..errors import RunDamagedError

    try:
        config = json.loads((folder / _CONFIG).read_text())
        asked = {name: config[name] for name in ("images", "backbone", "weights", "preset", "max_bad", "settings")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunDamagedError(
            f"{folder} is no folder of a cascade",
            expected=f"{_CONFIG}, as `selfmask cascade DATA --out {folder}` writes it",
            found=getattr(error, "strerror", None) or error,
            todo="check the path; a cascade that was begun in Python goes on there: Cascade.fit(..., out=...)",
        ) from error
    return asked | ({} if data is None else {"images": data}) | ({} if weights is None else {"weights": str(weights)})


def _job(folder: Path, asked: dict[str, Any]) -> Job:
    from ..backbones import load_backbone
    from ..commands.cascade.config import CascadeConfig
    from ..commands.cascade.job import Job
    from ..data import open_images

    config = CascadeConfig.preset(asked["preset"], **asked["settings"], track=())
    weights = None if asked["weights"] is None else Path(asked["weights"])
    loaded = load_backbone(asked["backbone"], weights=weights)
    about = {**asked, "backbone": loaded.name}  # all that the other commands need to know, in the folder's config.json
    images = open_images(asked["images"])
    return Job(loaded.model, images, config, folder, loaded.preprocessing, about, asked["max_bad"])


def _show(console: Console, folder: Path, as_json: bool, seconds: float) -> None:
    result = json.loads((folder / RunFile.RESULT).read_text())
    if as_json:
        print(json.dumps(result, indent=2))
        return
    paper = result["bytes"]["paper"]
    titles = {
        **{"float32": "float32 copies", "paper": "one bit a weight, as in the paper", "masks": "our masks"},
        **{"router": "router", "conditional": "PCA, conditional", "unconditional": "PCA, unconditional"},
        "file": "cascade.smn, all in all",
    }
    table = Table("", "bytes", "of the paper's", title="What is stored", title_justify="left")
    for name, title in titles.items():
        table.add_row(title, f"{result['bytes'][name]:,}", f"{result['bytes'][name] / paper:.2f}")
    console.print(table)
    improved = [kept == "mask" for kept in result["kept"][1:] if kept is not None]  # None: nothing was measured
    judged = f"{sum(improved)} of {len(improved)} experts are better than the dispatcher, by the quality without labels"
    _say(
        console,
        f"{result['images']:,} images in clusters of {', '.join(f'{each:,}' for each in result['sizes'])}",
        *([judged] if improved else []),
        f"{seconds:.0f} s",
        f"cascade: {folder}/cascade.smn",
        f"report:  {folder}/report.html",
        f"measure it with labels: selfmask evaluate {folder} --data LABELLED",
    )


def _say(console: Console, *lines: str) -> None:
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
