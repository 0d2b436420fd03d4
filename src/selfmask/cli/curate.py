"""`selfmask curate`: a look through a pile of images."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from .console import Console, print_json
from .embed import UseBackbone, UseBatchSize, UseMaxPixels, UseSize, UseWeights, UseWhat, may_use, progress_on


def curate(
    what: UseWhat,
    images: Annotated[
        str, typer.Argument(help="A folder, a list file, an .npz file or the name of a data set.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the lists and the page.")] = Path("curated"),
    label: Annotated[int, typer.Option(min=0, help="Number of images to label first.")] = 20,
    similar: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of the usual distance between neighbours from which down images are near-duplicates.",
            show_default="0.2",
        ),
    ] = None,
    strange: Annotated[
        float | None,
        typer.Option(min=0.0, help="Robust deviations from which on an image is an outlier.", show_default="2.5"),
    ] = None,
    split: Annotated[str, typer.Option(help="Split to use, if the data set has several.")] = "train",
    seed: Annotated[int, typer.Option(help="Seed of the clusters.")] = 0,
    batch_size: UseBatchSize = None,
    max_pixels: UseMaxPixels = None,
    backbone: UseBackbone = None,
    weights: UseWeights = None,
    size: UseSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Find near-duplicates and outliers among images, and say which to label first.

    Writes images.csv, curation.json and curation.html, a page with pictures; no image is moved or changed. Example:
    selfmask curate runs/birds photos/ --label 50
    """
    from ..commands.curate import PAGE
    from ..commands.curate import curate as run
    from ..commands.opening import load_embedder
    from ..data import open_images
    from ..data.images import MAX_PIXELS
    from ..evaluation.curating import SIMILAR, STRANGE

    console = Console(stderr=as_json)
    embedder = load_embedder(what, backbone=backbone, weights=weights, size=size, may_use=may_use)
    source = open_images(images, split=split, max_pixels=MAX_PIXELS if max_pixels is None else max_pixels)
    with progress_on(console, "embedding") as progress:
        found = run(
            embedder,
            source,
            out,
            title=images,
            similar=SIMILAR if similar is None else similar,
            strange=STRANGE if strange is None else strange,
            label=label,
            seed=seed,
            batch_size=batch_size or embedder.batch_size,
            progress=progress,
        )
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    groups = f"{len(found.duplicates):,} groups of near-duplicates ({found.superfluous:,} images could go)"
    console.say(
        f"{found.images:,} images: {groups}, {len(found.outliers):,} outliers",
        f"label first: {', '.join(found.to_label[:5])}{', ...' if len(found.to_label) > 5 else ''}",
        f"page: {out / PAGE}",
    )
    if found.bad:
        console.say(f"{len(found.bad):,} images could not be read")
