"""`selfmask check`: does a mask still help, on new images?"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.table import Table

from .adapt import NOTHING_GAINED
from .console import Console, print_json
from .embed import UseBackbone, UseMaxPixels, UseSize, UseWeights, UseWhat, may_use, progress_on

DRIFTED = 4
"""Exit code where the mask helps, but the images are not those that it was learned on."""


def check(
    what: UseWhat,
    images: Annotated[
        str,
        typer.Argument(help="New images: a folder, a list file, an .npz file or a data set.", show_default=False),
    ],
    old: Annotated[
        str | None,
        typer.Option(help="Images that the mask was learned on.", show_default="those that the run names"),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the new images, if the data set has several.")] = "train",
    seed: Annotated[int, typer.Option(help="Seed of distortions and samples.")] = 0,
    max_pixels: UseMaxPixels = None,
    backbone: UseBackbone = None,
    weights: UseWeights = None,
    size: UseSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Check whether a mask still helps on new images, and how far these have drifted.

    The gate of `selfmask adapt` looks at the new images; a classifier is asked to tell them from the old ones (50 % is
    a guess). Exit code 0: it helps. 3: that is not proven here. 4: it helps, but the images have drifted. Example:
    selfmask check runs/birds new-photos/
    """
    from ..commands.check import check as run
    from ..commands.check import gain_of_run
    from ..commands.evaluate import seen_by
    from ..commands.opening import images_of_run, load_embedder
    from ..data import open_images
    from ..data.images import MAX_PIXELS

    console = Console(stderr=as_json)
    embedder = load_embedder(what, backbone=backbone, weights=weights, size=size, may_use=may_use)
    limit = MAX_PIXELS if max_pixels is None else max_pixels
    source = open_images(images, split=split, max_pixels=limit)
    before = images_of_run(what) if old is None else open_images(old, max_pixels=limit)
    if before is None:
        console.say("the images of the run are not known here, so drift is not looked for; name them: --old")
    with progress_on(console, "embedding") as progress:
        seen, gain = seen_by(what, source), gain_of_run(what)
        found = run(embedder, source, before, seed=seed, seen=seen, run=gain, progress=progress)
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        table = Table("", "frozen", "with the mask", title_justify="left")
        table.add_row("quality (without labels)", f"{found.quality_before:.3f}", f"{found.quality_after:.3f}")
        console.print(table)
        verdict = (
            "The mask helps on these images" if found.helps else "That the mask helps on these images is not proven"
        )
        console.say(f"{verdict}: gain {found.gain:+.3f}, standard error {found.gain_error:.3f}.")
        if found.gain == found.gain_error == 0:
            console.say("All vectors are those of the frozen backbone, as with a mask that leaves all weights on.")
        if found.run_gain is not None:
            told = f"gain {found.run_gain:+.3f}, standard error {found.run_gain_error:.3f}"
            console.say(f"The run itself measured, at the best of its looks: {told}.")
        if (drift := found.drift) is not None:
            told = f"old and new images are told apart in {drift.rate:.1%} of cases"
            verdict = "The images have drifted" if found.drifted else "No drift is proven"
            console.say(f"{verdict}: {told} (50 % is a guess; standard error {drift.error:.1%}).")
        if found.seen:
            console.say(f"warning: the mask was learned on {found.seen:,} of these {found.images:,} images")
    if not found.helps:
        raise typer.Exit(NOTHING_GAINED)
    if found.drifted:
        raise typer.Exit(DRIFTED)
