"""`selfmask combine`: one mask out of several."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from .console import Console, print_json
from .embed import UseBackbone, UseMaxPixels, UseWeights, may_use
from .pull import brought_here


def combine(
    masks: Annotated[
        list[str],
        typer.Argument(
            help="Two masks or more, of one backbone and one selection: run folders, mask files (.smn), or addresses "
            "on the hub.",
            show_default=False,
        ),
    ],
    how: Annotated[
        Literal["vote", "and", "or"],
        typer.Option(
            help="vote leaves a weight on if at least half of the masks do, and if all of them do, or if any does."
        ),
    ] = "vote",
    out: Annotated[Path, typer.Option(help="Mask file to write.")] = Path("combined.smn"),
    images: Annotated[
        str | None,
        typer.Option(
            help="Images to take the batch-norm statistics from: a folder, a list file, an .npz file or a data set.",
            show_default="the means of the masks' own statistics",
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the images, if the data set has several.")] = "train",
    seed: Annotated[int, typer.Option(help="Seed of the sample of images.")] = 0,
    max_pixels: UseMaxPixels = None,
    backbone: UseBackbone = None,
    weights: UseWeights = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Combine masks of one backbone into one: by vote, by what all leave on, or by what any leaves on.

    Heads are left behind, and so is a licence that is not that of all masks. Example:
    selfmask combine runs/birds runs/bats runs/bees --how vote --out animals.smn
    """
    from ..commands.combine import combine as run
    from ..data import open_images
    from ..data.images import MAX_PIXELS

    console = Console(stderr=as_json)
    limit = MAX_PIXELS if max_pixels is None else max_pixels
    source = None if images is None else open_images(images, split=split, max_pixels=limit)
    found = run(
        [brought_here(each, console) for each in masks],
        out,
        how=how,
        images=source,
        seed=seed,
        backbone=backbone,
        weights=weights,
        may_use=may_use,
    )
    if as_json:
        print_json({"out": str(out), **dataclasses.asdict(found)})
        return
    table = Table("mask", "active", title_justify="left")
    for name, active in zip(masks, found.actives, strict=True):
        table.add_row(name, f"{active:.2%}")
    table.add_row(f"{how} of them", f"{found.active:.2%}")
    console.print(table)
    taken = "are the means of theirs" if found.images is None else f"were taken from {found.images:,} images"
    console.say(f"{out}: {found.bytes:,} bytes; batch-norm statistics {taken}")
