"""`selfmask index`: a collection of images, to be searched by the frozen backbone and by masks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import Console, print_json
from .embed import UseBackbone, UseBatchSize, UseMaxPixels, UseSize, UseWeights, list_bad, may_use, progress_on

if TYPE_CHECKING:
    from ..serving.building import Built


def index(
    what: Annotated[
        list[str],
        typer.Argument(
            help="Run folders or mask files of one backbone; or only the name of a backbone.", show_default=False
        ),
    ],
    images: Annotated[
        str, typer.Argument(help="A folder, a list file, an .npz file or the name of a data set.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder of the collection, which must not exist yet.", show_default=False)],
    split: Annotated[str, typer.Option(help="Split to use, if the data set has several.")] = "train",
    batch_size: UseBatchSize = None,
    whiten: Annotated[
        str,
        typer.Option(
            help="Whiten the vectors with maps: auto, a power from 0 (centred) to 1 (fully whitened), or none. A run's "
            "map is used where there is one; others are fitted to these images."
        ),
    ] = "auto",
    thumbnail_size: Annotated[int, typer.Option(min=16, max=256, help="Longer side of thumbnails, in pixels.")] = 128,
    exact: Annotated[
        bool, typer.Option("--exact", help="Search large collections exactly, too: slower, without the extra `search`.")
    ] = False,
    max_pixels: UseMaxPixels = None,
    backbone: UseBackbone = None,
    weights: UseWeights = None,
    size: UseSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as one JSON object.")] = False,
) -> None:
    """Index images for searching: vectors of the frozen backbone and of masks, thumbnails, nearest neighbours.

    If it is stopped, the same command continues it. Example:  selfmask index runs/birds photos/ --out birds.index
    """
    from ..commands.index import index as run
    from ..data import open_images
    from ..data.images import MAX_PIXELS
    from ..evaluation.feature_map import power_named
    from ..serving.building import Settings

    console = Console(stderr=as_json)
    power = None if whiten == "none" else power_named(whiten)
    source = open_images(images, split=split, max_pixels=MAX_PIXELS if max_pixels is None else max_pixels)
    settings = Settings(power, whiten != "none", thumbnail_size, exact, batch_size or 64)
    start = time.monotonic()
    built = run(
        what,
        source,
        out,
        settings,
        title=images,
        backbone=backbone,
        weights=weights,
        size=size,
        may_use=may_use,
        stage=lambda name: progress_on(console, name),
        say=console.say,
    )
    seconds = time.monotonic() - start
    listed = list_bad(out, built.bad)
    if as_json:
        print_json({**_summary(out, built), "seconds": seconds})
        return
    about = built.about
    names = ", ".join(space.name for space in about.spaces)
    console.say(f"{about.images:,} images indexed in {out} ({names}; {_bytes(built):,} bytes; {seconds:,.0f} s)")
    if listed is not None:
        console.say(f"{len(built.bad):,} images could not be read and are not in it: see {listed}")
    console.say(f"search it: selfmask search {out} PHOTO")


def _summary(out: Path, built: Built) -> dict[str, object]:
    about = built.about
    return {
        "out": str(out),
        "images": about.images,
        "spaces": [{"name": each.name, "width": each.width, "power": each.power} for each in about.spaces],
        "bytes": _bytes(built),
        "files": {name: file.bytes for name, file in about.files.items()},
        "resumed": built.resumed,
        "bad": built.bad,
    }


def _bytes(built: Built) -> int:
    return sum(file.bytes for file in built.about.files.values())
