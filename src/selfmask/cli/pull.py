"""`selfmask pull`: from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..hub import is_address
from .console import Console, print_json

if TYPE_CHECKING:
    pass


def pull(
    address: Annotated[str, typer.Argument(help="OWNER/NAME, OWNER/NAME@REVISION, or with the file: OWNER/NAME/FILE.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; it must not exist.", show_default="the name of the repository")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="Largest file to download.", show_default="1,073,741,824")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Get a mask from the Hugging Face hub into a folder, which can be used as that of a run.

    Its size is asked before it is downloaded, and it is checked as every file is. With HF_HUB_OFFLINE=1, only what was
    downloaded before is used. Example:  selfmask pull me/birds --out birds
    """
    from ..commands.pull import pull as run
    from ..hub.transfer import MOST_BYTES

    folder, found = run(address, out, most=max_bytes or MOST_BYTES)
    if as_json:
        print_json({"folder": str(folder), "address": str(found), "repo": found.repo, "commit": found.revision})
    else:
        Console().say(f"pulled: {found}", f"folder: {folder}")


def brought_here(what: str, console: Console) -> str:
    """The same, or the file on this machine of what is on the hub; the commit is told."""
    if not is_address(what):
        return what
    from ..commands.pull import fetch_all

    address, files = fetch_all(what)
    console.say(f"using {address}")
    return str(next(iter(files.values())).path)
