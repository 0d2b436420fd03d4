"""`selfmask push`: to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import Console, print_json

Licence = Annotated[
    str | None,
    typer.Option(
        "--licence", "--license", help="Licence of what is shared: an identifier of the hub such as cc-by-4.0."
    ),
]
DataName = Annotated[
    str | None,
    typer.Option(help="What it was learned from, in your words. Paths and names of files are never published."),
]
Public = Annotated[bool, typer.Option("--public", help="Let everybody see the repository, if it is made now.")]


def push(
    what: Annotated[Path, typer.Argument(help="A finished run folder, or a mask file (.smn).", show_default=False)],
    repo: Annotated[str, typer.Argument(help="Repository of the hub: OWNER/NAME.", show_default=False)],
    licence: Licence = None,
    data_name: DataName = None,
    public: Public = False,
    with_map: Annotated[bool, typer.Option("--map/--no-map", help="Share the run's map, too.")] = True,
    revision: Annotated[str | None, typer.Option(help="Branch to push to.", show_default="main")] = None,
    message: Annotated[str | None, typer.Option(help="Message of the commit.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card and the files, and push nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Share a mask on the Hugging Face hub: the file, its map and a model card, in one commit.

    Log in first: hf auth login. Nothing else of the run is published. Example:  selfmask push runs/birds me/birds
    --licence cc-by-4.0 --data-name "1,000 photos of birds, my own"
    """
    from ..commands.push import CARD, contents
    from ..commands.push import push as run

    console = Console(stderr=as_json)
    if dry_run:
        files = contents(what, repo, licence=licence, data=data_name, with_map=with_map)
        card = files[CARD].decode()
        sizes = {name: len(content) for name, content in files.items()}
        if as_json:
            print_json({"files": sizes, "card": card})
        else:
            console.say(*card.splitlines(), "", *(f"{name}: {size:,} bytes" for name, size in sizes.items()))
        return
    address = run(
        what,
        repo,
        licence=licence,
        data=data_name,
        private=not public,
        with_map=with_map,
        revision=revision,
        message=message,
    )
    if as_json:
        print_json({"address": str(address), "repo": address.repo, "commit": address.revision})
    else:
        console.say(f"pushed: {address}")
