"""`selfmask compare`: methods side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from .train import LabelledData, Preset


def compare(
    data: LabelledData,
    backbone: Annotated[str, typer.Option(help="Which backbone; see `selfmask backbones`.")] = "resnet50",
    methods: Annotated[
        str, typer.Option(help="With commas: frozen, mask, self-mask, full, linear, lora, bitfit.")
    ] = "frozen,mask,self-mask,full,linear,lora,bitfit",
    label_fractions: Annotated[str, typer.Option(help="Shares of the labels, with commas.")] = "0.01,0.05,0.25,1.0",
    seeds: Annotated[int, typer.Option(min=1, help="How often each cell is run.")] = 3,
    stratified: Annotated[
        bool, typer.Option("--stratified/--uniform", help="That share of each class, or of all images as they come.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Where all runs go.", show_default="runs/NAME-OF-IMAGES-compare")
    ] = None,
    preset: Annotated[Preset, typer.Option(help="fast takes minutes a cell; paper is the paper's.")] = Preset.fast,
    steps: Annotated[int | None, typer.Option(help="Of runs with labels.", show_default="fast: 300")] = None,
    adapt_steps: Annotated[int | None, typer.Option(help="Of self-mask.", show_default="fast: 120")] = None,
    size: Annotated[int | None, typer.Option(help="Pixels a side.", show_default="the backbone's own")] = None,
    batch_size: Annotated[int, typer.Option(help="Images in a step.")] = 64,
    weights: Annotated[Path | None, typer.Option(help="A file with the backbone's weights.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all cells as one JSON object.")] = False,
) -> None:
    """Compare masks with fine-tuning, linear heads, LoRA and BitFit: accuracy against labels and against bytes.

    Stopped at any moment, the same command goes on; more seeds, shares or methods may be added later. Writes
    compare.json, compare.md and compare.png.

    Example:  selfmask compare birds/ --backbone resnet50 --methods frozen,self-mask,full
    """
    from ..backbones import load_backbone
    from ..commands.compare import CompareConfig
    from ..commands.compare import compare as run
    from ..data.partition import open_labelled
    from ..errors import ConfigError, RunWriteError
    from ..files import write_atomically
    from ..report.comparison import as_dict, draw, head, markdown, rows
    from ..training.stages import StagesDisplay

    try:
        shares = tuple(float(share) for share in label_fractions.split(","))
    except ValueError:
        raise ConfigError("shares of the labels are numbers", found=label_fractions, todo="0.01,0.1,1.0") from None
    config = CompareConfig(
        methods=cast(Any, tuple(name.strip() for name in methods.split(","))),  # CompareConfig says which there are
        label_fractions=shares,
        seeds=seeds,
        stratified=stratified,
        preset=preset.value,
        steps=steps,
        adapt_steps=adapt_steps,
        size=size,
        batch_size=batch_size,
    )
    console = Console(stderr=as_json)
    images, test = open_labelled(data)
    where = out or Path("runs") / f"{Path(data).resolve().stem}-compare"
    comparison = run(
        *(lambda: load_backbone(backbone, weights=weights), images, test, config),
        out=where,
        about={"data": data, "weights": None if weights is None else str(weights.resolve())},
        display=StagesDisplay(console),
    )
    write_atomically(where / "compare.json", json.dumps(as_dict(comparison), indent=2).encode(), RunWriteError)
    write_atomically(where / "compare.md", markdown(comparison).encode(), RunWriteError)
    draw(comparison, where / "compare.png")
    if as_json:
        print(json.dumps(as_dict(comparison), indent=2))
        return
    table = Table(*head(comparison), title="Accuracy, by share of the labels", title_justify="left")
    for row in rows(comparison):
        table.add_row(*row)
    console.print(table)
    console.print(f"{where}/compare.png, compare.md, compare.json", highlight=False, markup=False, soft_wrap=True)
