"""`selfmask compress`: how small masks and weights become, by which compressor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from .console import Console, print_json
from .embed import UseBackbone, UseWeights, may_use

if TYPE_CHECKING:
    from ..maskfile.compressing import Sizes


def compress(
    files: Annotated[
        list[Path],
        typer.Argument(help="Mask files (.smn), weights (.safetensors, .pt), or run folders.", show_default=False),
    ],
    backbone: UseBackbone = None,
    weights: UseWeights = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Compress masks and weights with general compressors, and compare the bytes with our own coding.

    Reductions are against one bit a weight and, since the paper has them so, against two; those of weights are against
    the weights as they are. Example:  selfmask compress runs/birds/mask.smn runs/tuned/tuned.safetensors
    """
    from ..commands.compress import compress as sizes_of
    from ..maskfile.compressing import missing

    found = {str(file): sizes_of(file, backbone=backbone, weights=weights, may_use=may_use) for file in files}
    if as_json:
        print_json({"files": {name: _plain(sizes) for name, sizes in found.items()}, "missing": missing()})
        return
    console = Console()
    for name, sizes in found.items():
        console.say(f"{name}: {'a mask of ' if sizes.is_mask else ''}{sizes.values:,} weights")
        console.print(_table(sizes))
    if absent := missing():
        console.say(f"not installed, so not shown: {', '.join(absent)} (pip install lz4 python-snappy)")


def _plain(sizes: Sizes) -> dict[str, Any]:
    return {"kind": "mask" if sizes.is_mask else "weights", "paper_plain": sizes.paper_plain} | dataclasses.asdict(
        sizes
    )


def _table(sizes: Sizes) -> Table:
    rows = {"1 bit a weight" if sizes.is_mask else "as they are": sizes.plain, **sizes.by}
    columns = ["reduction"]
    if sizes.coded is not None:
        rows = {"2 bits a weight": sizes.paper_plain, **rows, "selfmask (.smn)": sizes.coded}
        columns = ["against 1 bit", "against 2 bits"]
    table = Table("by", "bytes", *columns)
    for by, size in rows.items():
        whole = (sizes.plain, sizes.paper_plain)[: len(columns)]
        table.add_row(by, f"{size:,}", *(f"{1 - size / max(each, 1):.2%}" for each in whole))
    return table
