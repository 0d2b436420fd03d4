"""`selfmask find`: which of many masks fits these images?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from .adapt import NOTHING_GAINED
from .console import Console, print_json
from .embed import UseBackbone, UseMaxPixels, UseWeights, may_use, progress_on
from .masks import UseBase, UseLicence

if TYPE_CHECKING:
    from ..commands.find import FoundMask


def find(
    masks: Annotated[Path, typer.Argument(help="A folder of masks: .smn files and run folders.", show_default=False)],
    images: Annotated[
        str, typer.Argument(help="A folder, a list file, an .npz file or the name of a data set.", show_default=False)
    ],
    most: Annotated[int, typer.Option(min=10, help="Number of images to look at, at most.")] = 256,
    split: Annotated[str, typer.Option(help="Split of the images, if the data set has several.")] = "train",
    seed: Annotated[int, typer.Option(help="Seed of distortions and samples.")] = 0,
    base: UseBase = None,
    licence: UseLicence = None,
    max_pixels: UseMaxPixels = None,
    backbone: UseBackbone = None,
    weights: UseWeights = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Find the mask that fits some images best, among many and the frozen backbone, without labels.

    All are seen on 64 images, and those that are not proven worse than the best on twice as many, and so on. The
    measure is that of the gate of `selfmask adapt`. Exit code 0: a mask is proven better than the frozen backbone. 3:
    none is. Example:  selfmask find masks/ photos/
    """
    from ..commands.find import find as run
    from ..data import open_images
    from ..data.images import MAX_PIXELS

    console = Console(stderr=as_json)
    source = open_images(images, split=split, max_pixels=MAX_PIXELS if max_pixels is None else max_pixels)
    start = time.monotonic()
    with progress_on(console, "comparing") as progress:
        found = run(
            masks,
            source,
            most=most,
            seed=seed,
            base=base,
            licence=licence,
            backbone=backbone,
            weights=weights,
            may_use=may_use,
            progress=progress,
        )
    if as_json:
        print_json({**_summary(found), "seconds": time.monotonic() - start})
    else:
        _show(console, found)
    if not found.race.helps:
        raise typer.Exit(NOTHING_GAINED)


def _summary(found: FoundMask) -> dict[str, Any]:
    race = found.race
    return {
        "best": race.best.name,
        "helps": race.helps,
        "clear": race.clear,
        "images": found.images,
        "passes": found.passes,
        "all_passes": found.all_passes,
        "masks": [
            {
                "name": place.name,
                "images": place.images,
                "quality": place.quality,
                "gain": place.gain.mean,
                "gain_error": place.gain.error,
                "worse": place.worse,
            }
            for place in race.places
        ],
        "skipped": found.skipped,
    }


def _show(console: Console, found: FoundMask) -> None:
    race = found.race
    table = Table("mask", "images", "quality", "gain over frozen", "", title_justify="left")
    for number, place in enumerate(race.places):
        told = "best" if number == 0 else "worse" if place.worse else "not told apart from the best"
        gain = f"{place.gain.mean:+.3f} ± {place.gain.error:.3f}"
        table.add_row(place.name, f"{place.images:,}", f"{place.quality:.3f}", gain, told)
    console.print(table)
    console.say(
        "Quality falls with the number of images, gains hardly do. "
        f"{found.passes:,} images and copies went through a network, {found.passes / found.all_passes:.0%} of what a "
        "comparison of all on all would take."
    )
    for name, why in found.skipped.items():
        console.say(f"left out: {name}: {why}")
    verdict = "fits these images best, and is proven better than the frozen backbone"
    if not race.helps:
        verdict = "is ahead, but no mask is proven better than the frozen backbone"
    console.say(f"{race.best.name} {verdict}{'' if race.clear else '; others are not told apart from it'}.")
