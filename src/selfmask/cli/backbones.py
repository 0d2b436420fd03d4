"""`selfmask backbones`: what can be named, how large it is, and whether its weights are here."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .console import Console, print_json

if TYPE_CHECKING:
    from ..backbones import BackboneInfo


def backbones(
    pattern: Annotated[
        str | None, typer.Argument(help="Part of a name, or a glob pattern such as 'vit*dino*'.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List backbones: vector length, size, and whether the weights are on this machine.

    Without a pattern, some well-known ones are listed. Example:  selfmask backbones dinov2
    """
    from ..backbones import list_backbones, names

    matching = names(pattern)
    shown = list_backbones(pattern)
    if as_json:
        print_json([dataclasses.asdict(info) for info in shown])
        return
    console = Console()
    console.print(_table(shown))
    if len(matching) > len(shown):
        console.say(
            f"showing the first {len(shown)} of {len(matching):,} matches; use a more specific pattern to see others"
        )
    elif pattern is None:
        console.say(
            "any timm model works, and open_clip/ARCH:TAG; search with a pattern:",
            "  selfmask backbones 'vit*dino*'",
            "  selfmask backbones 'open_clip/*'",
        )


def _table(shown: list[BackboneInfo]) -> Table:
    table = Table(title="backbones", title_justify="left")
    table.add_column("name", no_wrap=True)
    for title in ("vector length", "million weights", "image size", "on this machine"):
        table.add_column(title, justify="right")
    for info in shown:
        image = f"{info.size[0]}x{info.size[1]}"
        here = "yes" if info.local else "no"
        table.add_row(info.name, f"{info.width:,}", f"{info.parameters / 1e6:.1f}", image, here)
    return table
