"""`selfmask datasets`: what can be named, how large it is, who divided it, and whether it is here."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .console import Console, print_json

if TYPE_CHECKING:
    from ..data.catalogue import DatasetInfo


def datasets(
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List data sets known by name: images, classes, split, licence, and whether they are on this machine.

    The paper's ten come first, then the bundled one, then array files (NAME.npz) in the data folder, which the
    environment variable SELFMASK_DATA names. Numbers are those of the images that a run would learn from and test
    with: of what is on this machine they are counted, of the rest they are those that its authors state.

    The paper used CoOp's splits (train and val to learn from, test to test with). They are used if CoOp's split file
    lies where CoOp keeps it, beside the images; otherwise torchvision's splits are. A run says which it uses.

    Nothing is downloaded here. Images that a split names and that are not there are listed as missing; such a data
    set cannot be opened before they are put there.

    Examples:  selfmask datasets
    SELFMASK_DATA=/data selfmask datasets --json
    selfmask adapt dtd --backbone resnet50
    """
    from ..data.catalogue import list_datasets
    from ..data.images import printable
    from ..data.named import TORCHVISION, data_folder

    found = list_datasets()
    if as_json:
        print_json([dataclasses.asdict(info) for info in found])
        return
    console, where = Console(), printable(data_folder())
    paper = [info for info in found if info.kind == "paper"]
    console.print(_table(paper, "data sets of the paper", "split"))
    console.say(
        "split: own: a fixed fifth of each class is tested with; file: that of the array file; *: not as in the paper",
        f"licence, and where it is or how to get it; paths are below {where} (SELFMASK_DATA):",
        *(f"  {info.name}: {info.licence}; {f'in {info.where}' if info.here == 'yes' else info.get}" for info in paper),
    )
    console.print(_table([info for info in found if info.kind != "paper"], "bundled, and array files", "licence"))
    console.say(f"also from torchvision: {', '.join(sorted({*TORCHVISION} - {info.name for info in paper}))}")
    for info in found:
        if info.missing:
            console.say(f"{info.name} is here in part: {info.missing}")


def _table(shown: list[DatasetInfo], title: str, further: str) -> Table:
    """further: a field to show."""
    table = Table(title=title, title_justify="left")
    table.add_column("name", no_wrap=True)
    for head in ("train", "test", "classes"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column(further, no_wrap=True)
    table.add_column("here", no_wrap=True)
    for info in shown:
        train = f"{info.images:,} in all" if info.images and info.train is None else _number(info.train)
        other = "*" if further == "split" and info.split != info.paper_split else ""
        words = (f"{getattr(info, further)}{other}", info.here)
        table.add_row(info.name, train, _number(info.test), _number(info.classes), *words)
    return table


def _number(count: int | None) -> str:
    return "" if count is None else f"{count:,}"
