"""`selfmask masks`: what there is in a folder of masks; many of them in one file."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .console import Console, print_json
from .embed import UseBackbone, UseWeights, may_use

if TYPE_CHECKING:
    from ..shelf import About

_PACK, _UNPACK = "pack", "unpack"
_MOST = 500  # rows of the table; nobody reads more

UseBase = Annotated[
    str | None,
    typer.Option(help="Only masks of this backbone: part of its name, or a glob pattern.", show_default=False),
]
UseLicence = Annotated[
    str | None,
    typer.Option(
        "--licence",
        "--license",
        help="Only masks under this licence: part of it, or a glob pattern.",
        show_default=False,
    ),
]


def masks(
    what: Annotated[
        str,
        typer.Argument(
            metavar="[pack|unpack] PATH",
            help="A folder of masks to list, or a pack; `pack` and a folder; or `unpack` and a pack.",
            show_default=False,
        ),
    ],
    path: Annotated[Path | None, typer.Argument(metavar="", show_default=False, hidden=True)] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File to pack into, or folder to unpack into.", show_default=False),
    ] = None,
    base: UseBase = None,
    licence: UseLicence = None,
    backbone: UseBackbone = None,
    weights: UseWeights = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """List a folder of masks; or pack many masks of one backbone into one file, and unpack it.

    Broken files are listed with what is wrong. A pack stores what masks share once, and each mask by how it differs
    from those before it; unpacking gives the same masks to the last bit.

    Examples:  selfmask masks masks/
    selfmask masks pack masks/ --out masks.pack
    selfmask masks unpack masks.pack --out again/
    """
    from ..commands.masks import list_masks, pack_masks, unpack_masks

    if what not in (_PACK, _UNPACK):
        _check(path is None, f"one folder or pack to list, and not {path} as well")
        _check(out is None, "--out only with pack and unpack")
        _list(list_masks(Path(what), base=base, licence=licence), as_json)
        return
    _check(path is not None and out is not None, f"selfmask masks {what} PATH --out PATH")
    assert path is not None
    assert out is not None
    if what == _PACK:
        done = pack_masks(path, out, base=base, licence=licence, backbone=backbone, weights=weights, may_use=may_use)
    else:
        _check(base is None and licence is None, "all masks of a pack are unpacked, without --base and --licence")
        done = unpack_masks(path, out, backbone=backbone, weights=weights, may_use=may_use)
    if as_json:
        print_json({"out": str(out), **dataclasses.asdict(done)})
        return
    share = f"{done.bytes / done.file_bytes:.1%}" if done.file_bytes else "all"
    Console().say(
        f"{out}: {done.masks:,} masks; {done.bytes:,} bytes in the pack, {done.file_bytes:,} as files ({share})"
    )


def _check(holds: bool, expected: str) -> None:
    if not holds:
        raise typer.BadParameter(f"expected: {expected}")


def _list(found: list[About], as_json: bool) -> None:
    if as_json:
        print_json([dataclasses.asdict(about) for about in found])
        return
    console = Console()
    table = Table("name", "base", title_justify="left")
    for head in ("bytes", "active", "licence", "quality", "date"):
        table.add_column(head, no_wrap=True)
    for about in found[:_MOST]:
        date = time.strftime("%Y-%m-%d", time.gmtime(about.changed))
        if about.problem is not None:
            table.add_row(about.name, "broken", f"{about.bytes:,}", "", "", "", date)
            continue
        base = about.base or "unnamed"
        active = "" if about.active is None else f"{about.active:.2%}"
        kind = "" if about.kind == "mask" else f" ({about.kind})"
        table.add_row(about.name, base + kind, f"{about.bytes:,}", active, about.licence, _quality(about), date)
    console.print(table)
    for about in found[:_MOST]:
        if about.problem is not None:
            console.say(f"{about.name} is broken: {about.problem}")
    if len(found) > _MOST:
        console.say(f"and {len(found) - _MOST:,} more: see --json")
    broken = sum(about.problem is not None for about in found)
    console.say(f"{len(found):,} masks, {sum(about.bytes for about in found):,} bytes; {broken:,} broken")


def _quality(about: About) -> str:
    """What the run of a mask found, without labels."""
    if about.kept == "identity":
        return "gained nothing"
    if about.quality_before is None or about.quality_after is None:
        return ""
    return f"{about.quality_before:.3f} to {about.quality_after:.3f}"
