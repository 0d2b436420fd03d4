"""`selfmask evaluate`: how good the vectors are, on labelled images, before and after."""

from __future__ import annotations

import dataclasses
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import BadImageError
from .embed import progress_on

if TYPE_CHECKING:
    from ..data import Images
    from ..evaluation.before_after import KnnResult


class Protocol(StrEnum):
    knn = "knn"


def evaluate(
    what: Annotated[
        str, typer.Argument(help="A run folder, a mask file (.smn) or a backbone's name.", show_default=False)
    ],
    data: Annotated[
        str, typer.Option(help="Labelled images: a folder with a folder for each class, or the name of a data set.")
    ],
    protocol: Annotated[Protocol, typer.Option(help="How to measure.")] = Protocol.knn,
    k: Annotated[int, typer.Option(min=1, help="How many neighbours vote.")] = 200,
    temperature: Annotated[float, typer.Option(help="Votes weigh exp(similarity / temperature).")] = 0.1,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in one forward pass.")] = 64,
    backbone: Annotated[str | None, typer.Option(help="What to put the mask on, if its file does not say.")] = None,
    weights: Annotated[Path | None, typer.Option(help="A file with the backbone's weights.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object.")] = False,
) -> None:
    """Measure with labels: accuracy of the frozen backbone, and of the mask beside it.

    Example:  selfmask evaluate runs/birds --data labelled-birds/
    """
    from ..data import open_images
    from ..evaluation.before_after import knn_before_after
    from ..loading import load_embedder

    console = Console(stderr=as_json)
    train, test = open_images(data, split="train"), open_images(data, split="test")
    divided = not _same(train, test)
    if not divided:
        console.print("not divided into train and test: one half, chosen at random in each class, tests the other")
    embedder = load_embedder(what, backbone=backbone, weights=weights)
    with progress_on(console, "embedding") as progress:
        result = knn_before_after(
            *(embedder, train, test if divided else None),
            k=k,
            temperature=temperature,
            batch_size=batch_size,
            progress=progress,
        )
    if result.k < k:
        console.print(f"k = {k} is more than there are training images: using {result.k}", highlight=False)
    if as_json:
        print(json.dumps({"protocol": protocol.value, **dataclasses.asdict(result)}, indent=2))
    else:
        _show(console, embedder.name, result)


def _same(train: Images, test: Images) -> bool:
    """Whether both splits are all of one undivided source: the same names and labels, and the same pixels."""
    if (train.names, train.labels) != (test.names, test.labels):
        return False
    for number in (0, len(train) // 2, len(train) - 1):
        try:
            if not train[number].equal(test[number]):
                return False
        except BadImageError:
            continue  # bad in both, or we shall see at another
    return True


def _show(console: Console, name: str, result: KnnResult) -> None:
    table = Table("", "top-1", title=escape(name), title_justify="left")
    table.add_row("frozen backbone", f"{result.knn_before:.2%}")
    if result.knn_after is not None:
        table.add_row("with the mask", f"{result.knn_after:.2%}")
    console.print(table)
    console.print(
        f"k-NN, k = {result.k}, temperature {result.temperature}: {result.test_images:,} test images by "
        f"{result.train_images:,} training images of {result.classes} classes",
        highlight=False,
    )
