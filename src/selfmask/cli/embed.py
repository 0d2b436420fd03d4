"""`selfmask embed`: a file of vectors, one for each image."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ..plain import plain
from .console import Console, print_json
from .launching import JobOption, LaunchOption
from .pull import brought_here
from .sharding import launch_shards, say_shards, shards_named

if TYPE_CHECKING:
    from ..cascade.model import Cascade
    from ..embedding.vectors import Progress


class Combination(StrEnum):
    conditional = "conditional"
    unconditional = "unconditional"


class Precision(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Scale(StrEnum):
    whiten = "whiten"
    none = "none"
    eigenvalues = "eigenvalues"


UseWhat = Annotated[
    str,
    typer.Argument(
        help="A run folder, a mask or cascade file (.smn), what the hub has (hf://...), or the name of a backbone.",
        show_default=False,
    ),
]
UseBackbone = Annotated[str | None, typer.Option(help="Backbone of the mask, if its file does not name one at hand.")]
UseWeights = Annotated[Path | None, typer.Option(help="File with the backbone's weights.")]
UseSize = Annotated[
    int | None, typer.Option(min=1, help="Image size.", show_default="as stored with the mask or backbone")
]
UseBatchSize = Annotated[
    int | None, typer.Option(min=1, help="Number of images per forward pass.", show_default="64; 512 for a cascade")
]
UseScale = Annotated[
    Scale | None,
    typer.Option(
        help="Scaling of a cascade's vectors: whiten (unit variance), none, or eigenvalues (division by the variance).",
        show_default="as stored in the cascade",
    ),
]
UseMaxPixels = Annotated[
    int | None,
    typer.Option(
        help="Largest number of pixels of an image; those with more count as unreadable.", show_default="50,000,000"
    ),
]

_SECONDS = 10  # between two lines where there is no terminal to draw a bar on


def embed(
    what: UseWhat,
    images: Annotated[
        str,
        typer.Argument(
            help="A folder, a list file, an .npz file, shards (.tar, .parquet, also URLs), videos or a data set.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write: .parquet or .npz; with --shard, a folder.")] = Path(
        "features.npz"
    ),
    split: Annotated[str, typer.Option(help="Split to use, if the data set has several.")] = "train",
    batch_size: UseBatchSize = None,
    combination: Annotated[
        Combination,
        typer.Option(
            help="For a cascade: conditional runs the dispatcher and one expert per image, unconditional all experts."
        ),
    ] = Combination.conditional,
    scale: UseScale = None,
    whiten: Annotated[
        str | None,
        typer.Option(
            help="Whiten the vectors with a map: auto, or a power from 0 (centred) to 1 (fully whitened).",
            show_default="not whitened; auto with --map",
        ),
    ] = None,
    map_file: Annotated[
        Path | None,
        typer.Option(
            "--map",
            help="File with the map to whiten with. If it does not exist, a map is fitted to the images first.",
            show_default="that of the run",
        ),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Write the tokens of the last layer: an array [tokens, width] per image.")
    ] = False,
    feature_map: Annotated[
        str | None,
        typer.Option(metavar="LAYER", help="Write the output of a layer: an array per image.", show_default=False),
    ] = None,
    max_pixels: UseMaxPixels = None,
    backbone: UseBackbone = None,
    weights: UseWeights = None,
    size: UseSize = None,
    precision: Annotated[
        Precision, typer.Option(help="What the backbone computes with; vectors are float32 in any case.")
    ] = Precision.float32,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the backbone with torch.compile.")] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Write only shard I of N, or all/N, to the folder --out, as parquet; processes may share the work.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="With --shard: keep the shards that are finished.")] = False,
    launch: LaunchOption = None,
    job_option: JobOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as one JSON object.")] = False,
) -> None:
    """Turn images into vectors: write file names and float32 vectors to one file.

    If it is stopped, the same command continues it. Example:  selfmask embed runs/birds photos/ --out birds.npz
    """
    from ..cascade.model import Cascade
    from ..commands.opening import load_embedder
    from ..data import open_images
    from ..data.images import MAX_PIXELS
    from ..embedding.dense import dense
    from ..embedding.features import write_features
    from ..embedding.mapping import fit_map, map_of_run, whitened
    from ..embedding.shards import write_shards
    from ..evaluation.feature_map import power_named

    console = Console(stderr=as_json)

    if tokens or feature_map is not None:
        _check_dense(tokens, feature_map, whiten, map_file)
    shards = shards_named(shard, out, resume, launch)
    if shards is not None and launch is not None:
        launch_shards(shards, out, launch, job_option, console)
    power_named("auto" if whiten is None else whiten)  # a wrong one is said before the work
    what = brought_here(what, console)
    embedder = load_embedder(what, backbone=backbone, weights=weights, size=size, may_use=may_use)
    embedder = dataclasses.replace(embedder, precision=precision.value, compile=compiled)
    if isinstance(cascade := embedder.model, Cascade):
        cascade.scale = cascade.scale if scale is None else scale.value
        embedder = dataclasses.replace(embedder, variant=combination.value)
        say_scale(cascade, console.say)
    if tokens or feature_map is not None:
        embedder = dense(embedder, feature_map)
    source = open_images(images, split=split, max_pixels=MAX_PIXELS if max_pixels is None else max_pixels)
    start = time.monotonic()
    if whiten is not None or map_file is not None:
        file = map_file or map_of_run(what)
        if not os.path.exists(file):  # noqa: PTH110  # Path.exists raises on names that no path can have
            with progress_on(console, "fitting the map") as progress:
                fitted = fit_map(embedder, source, batch_size=batch_size or embedder.batch_size, progress=progress)
            fitted.save(file)
            console.say(f"a map was fitted to {fitted.images:,} images and written to {file}")
        embedder = whitened(embedder, what, "auto" if whiten is None else whiten, file)
    if shards is not None:
        with progress_on(console, "embedding") as progress:
            done = write_shards(
                out,
                shards,
                embedder,
                source,
                batch_size=batch_size or embedder.batch_size,
                resume=resume or launch is not None,
                progress=progress,
                say=console.say,
            )
        say_shards(out, shards, done, time.monotonic() - start, console, as_json)
        return
    with progress_on(console, "embedding") as progress:
        written = write_features(
            out,
            embedder,
            source,
            batch_size=batch_size or embedder.batch_size,
            progress=progress,
            say=console.say,
        )
    seconds = time.monotonic() - start
    listed = list_bad(out, written.bad)
    speed = (len(source) - written.resumed) / seconds
    if as_json:
        summary = {"out": str(out), "images": len(source), **dataclasses.asdict(written), "seconds": seconds}
        if embedder.shape:
            summary |= {"shape": list(embedder.shape)}
        if embedder.map is not None:
            summary |= {"map": embedder.map.sha256, "power": embedder.map.power}
        print_json(summary | {"images_per_second": speed})
        return
    what = f"arrays of shape {list(embedder.shape)}" if embedder.shape else f"vectors of length {written.width}"
    console.say(f"{written.rows:,} {what} written to {out} ({speed:,.0f} images/s)")
    if listed is not None:
        console.say(f"{len(written.bad):,} images could not be read and have no vector: see {listed}")


def _check_dense(tokens: bool, feature_map: str | None, whiten: str | None, map_file: Path | None) -> None:
    from ..errors import ConfigError

    if tokens and feature_map is not None:
        raise ConfigError("--tokens and --feature-map exclude each other", todo="give one of them")
    if whiten is not None or map_file is not None:
        raise ConfigError("only vectors can be whitened", todo="leave out --whiten and --map")


def say_scale(cascade: Cascade, say: Callable[[str], None]) -> None:
    """Whitening is good for nearest neighbours, and bad for learning from few labels: nobody should find out late."""
    if cascade.scale != "none":
        say(f"the cascade's vectors are scaled ({cascade.scale}); to learn from few labels, use --scale none")


def list_bad(out: Path, bad: Sequence[tuple[str, str]]) -> Path | None:
    """Name the images without a vector in a file next to the output; None if there are none."""
    from ..errors import FeaturesWriteError
    from ..files import write_atomically

    listed = out.with_name(f"{out.name}.bad.txt")
    if not bad:
        if _is_list(listed):  # of an earlier run
            listed.unlink(missing_ok=True)
        return None
    text = "".join(f"{plain(name)}\t{plain(why)}\n" for name, why in bad)
    write_atomically(listed, text.encode("utf-8", "backslashreplace"), FeaturesWriteError)
    return listed


def _is_list(file: Path) -> bool:
    """Whether a file is such a list, and not somebody else's of the same name."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return False
    return all(b"\t" in line for line in lines)


def may_use(name: str) -> bool:
    """Whether a backbone that only a file names may be downloaded or built: asked at a terminal; elsewhere, no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    what = f"The file was made for the backbone {name[:200]!r}, which would be downloaded or built from other files."
    return typer.confirm(f"{what} Use it?", default=False, err=True)


@contextmanager
def progress_on(console: Console, what: str) -> Iterator[Progress]:
    """A bar with the time left; plain lines, now and then, where the output is not a terminal."""
    if not console.redraws:
        yield _lines(console, what)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(console: Console, what: str) -> Progress:
    start = last = time.monotonic()
    first: int | None = None

    def progress(done: int, total: int) -> None:
        nonlocal last, first
        now = time.monotonic()
        if first is None:
            first = done  # a resumed run starts far from zero
        if now - last >= _SECONDS and done > first:
            left = (now - start) * (total - done) / (done - first)
            console.say(f"{what}: {done:,} of {total:,} images, {left:,.0f} s left")
            last = now

    return progress
