"""`selfmask search`: the images of a collection that are nearest to a photo, frozen and by mask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from .console import Console, print_json
from .embed import UseBackbone, UseMaxPixels, UseWeights, may_use

if TYPE_CHECKING:
    from ..commands.search import Found
    from ..serving.collection import Collection, Space

_SIDE = 256  # pixels of the photo on a page


def search(
    folder: Annotated[Path, typer.Argument(help="A collection made by `selfmask index`.", show_default=False)],
    photos: Annotated[list[Path], typer.Argument(help="Image files to search for.", show_default=False)],
    k: Annotated[int, typer.Option("--k", "-k", min=1, max=1000, help="Number of nearest images.")] = 10,
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Search by these vectors only: frozen, or the name of a mask; may be repeated.",
            show_default="all that were indexed",
        ),
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page with the images: FILE.html.")] = None,
    max_pixels: UseMaxPixels = None,
    backbone: UseBackbone = None,
    weights: UseWeights = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as one JSON object.")] = False,
) -> None:
    """Find the images of a collection that are nearest to a photo, by the frozen backbone and by each mask.

    Example:  selfmask search birds.index photo.jpg -k 5 --page nearest.html
    """
    from ..commands.search import search as run
    from ..data.images import MAX_PIXELS
    from ..serving.collection import Collection

    console = Console(stderr=as_json)
    with Collection.open(folder) as collection:
        found = run(
            collection,
            photos,
            k,
            spaces=by or None,
            backbone=backbone,
            weights=weights,
            max_pixels=MAX_PIXELS if max_pixels is None else max_pixels,
            may_use=may_use,
        )
        if as_json:
            print_json({"collection": str(folder), "images": len(collection), "results": _plain(collection, found)})
        else:
            for each in found:
                _show(console, collection, each)
        if page is not None:
            _write_page(page, collection, found)
            console.say(f"page: {page}")


def _plain(collection: Collection, found: Sequence[Found]) -> list[dict[str, Any]]:
    return [
        {"photo": each.photo, "neighbours": {name: collection.listed(near) for name, near in each.neighbours.items()}}
        for each in found
    ]


def _title(space: Space) -> str:
    return space.about.title if space.about.is_frozen else f"{space.name} ({space.about.title})"


def _show(console: Console, collection: Collection, found: Found) -> None:
    """The nearest images of each kind of vectors, side by side."""
    table = Table("", title=found.photo, title_justify="left")
    for name in found.neighbours:
        table.add_column(_title(collection.spaces[name]), overflow="fold")
    columns = [collection.listed(near) for near in found.neighbours.values()]
    for place in range(max(map(len, columns))):
        cells = [_cell(column[place]) if place < len(column) else "" for column in columns]
        table.add_row(str(place + 1), *cells)
    console.print(table)


def _cell(item: dict[str, Any]) -> str:
    label = "" if item["label"] is None else f" ({item['label']})"
    return f"{item['similarity']:.3f}  {item['name']}{label}"


def _write_page(path: Path, collection: Collection, found: Sequence[Found]) -> None:
    from ..report.examples import thumbnail  # here, because matplotlib takes its time
    from ..report.search import Near, Searched, write_search

    shown = []
    for each in found:
        rows = {
            _title(collection.spaces[name]): [
                Near(collection.thumbnails[item["number"]], item["name"], item["label"], item["similarity"])
                for item in collection.listed(near)
            ]
            for name, near in each.neighbours.items()
        }
        shown.append(Searched(each.photo, thumbnail(each.image, _SIDE), rows))
    write_search(path, f"Nearest of {len(collection):,} images of {collection.about.title}", shown)
