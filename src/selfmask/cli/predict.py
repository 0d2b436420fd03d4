"""`selfmask predict`: the class of each image."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .console import Console, print_json
from .embed import (
    UseBackbone,
    UseBatchSize,
    UseMaxPixels,
    UseSize,
    UseWeights,
    UseWhat,
    may_use,
    progress_on,
)

_SHOWN = 12  # classes


class PredictBy(StrEnum):
    probe = "probe"
    knn = "knn"


def predict(
    what: UseWhat,
    images: Annotated[
        str, typer.Argument(help="A folder, a list file, an .npz file or the name of a data set.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="File to write: .csv or .parquet.")] = Path("labels.csv"),
    examples: Annotated[
        str | None,
        typer.Option(
            help="Labelled examples: a folder with a sub-folder for each class. They replace a head.",
            show_default="the head that was trained with the mask",
        ),
    ] = None,
    by: Annotated[
        PredictBy, typer.Option(help="What learns from the examples: probe (linear) or knn (nearest neighbours).")
    ] = PredictBy.probe,
    k: Annotated[
        int | None,
        typer.Option(min=1, help="Number of neighbours for knn.", show_default="20, or the size of the smallest class"),
    ] = None,
    whiten: Annotated[
        str | None,
        typer.Option(help="Whiten the vectors with the run's map: auto, or a power from 0 to 1.", show_default="no"),
    ] = None,
    split: Annotated[str, typer.Option(help="Split to use, if the data set has several.")] = "train",
    batch_size: UseBatchSize = None,
    max_pixels: UseMaxPixels = None,
    backbone: UseBackbone = None,
    weights: UseWeights = None,
    size: UseSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as one JSON object.")] = False,
) -> None:
    """Tell the class of each image, and how probable it is.

    By the head of a run of `selfmask train`, or by a few labelled examples on the adapted features. Example:
    selfmask predict runs/birds photos/ --examples labelled/ --out labels.csv
    """
    from ..commands.opening import load_embedder
    from ..commands.predict import check_out, predictor_for, write_predictions
    from ..commands.predict import predict as run
    from ..data import open_images
    from ..data.images import MAX_PIXELS
    from ..embedding.mapping import whitened
    from ..errors import ConfigError

    console = Console(stderr=as_json)
    check_out(out)
    embedder = load_embedder(what, backbone=backbone, weights=weights, size=size, may_use=may_use)
    if whiten is not None:
        if examples is None:
            raise ConfigError("a head takes vectors that are not whitened", todo="leave out --whiten")
        embedder = whitened(embedder, what, whiten)
    limit = MAX_PIXELS if max_pixels is None else max_pixels
    labelled = None if examples is None else open_images(examples, max_pixels=limit)
    source = open_images(images, split=split, max_pixels=limit)
    at_once = batch_size or embedder.batch_size
    with progress_on(console, "reading the examples") as progress:
        predictor = predictor_for(embedder, labelled, by=by.value, k=k, batch_size=at_once, progress=progress)
    with progress_on(console, "predicting") as progress:
        found = run(embedder, source, predictor, batch_size=at_once, progress=progress)
    write_predictions(out, found)
    if as_json:
        rows = ("names", "classes", "probabilities")
        summary = {key: value for key, value in dataclasses.asdict(found).items() if key not in rows}
        print_json({"out": str(out), "images": len(found.names), "counts": found.counts, **summary})
        return
    table = Table("class", "images", title_justify="left")
    for name, count in list(found.counts.items())[:_SHOWN]:
        table.add_row(name, f"{count:,}")
    console.print(table)
    console.say(f"{len(found.names):,} classes written to {out}")
    if found.accuracy is not None:
        console.say(f"{found.accuracy:.2%} of {found.compared:,} images are as their folders say")
    if found.bad:
        console.say(f"{len(found.bad):,} images could not be read and have no class")
