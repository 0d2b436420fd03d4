"""`selfmask export`: an adapted network for other programs."""

from __future__ import annotations

import dataclasses
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .console import Console, print_json
from .embed import Combination, UseBackbone, UseScale, UseSize, UseWeights, UseWhat, may_use


class ExportFormat(StrEnum):
    onnx = "onnx"
    pt2 = "pt2"
    safetensors = "safetensors"
    timm = "timm"


_ENDING = {
    ExportFormat.onnx: ".onnx",
    ExportFormat.pt2: ".pt2",
    ExportFormat.safetensors: ".safetensors",
    ExportFormat.timm: "",
}


def export(
    what: UseWhat,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write; for timm, a folder.", show_default="model.onnx, and so on"),
    ] = None,
    format: Annotated[
        ExportFormat,
        typer.Option(
            help="onnx: for ONNX Runtime. pt2: torch.export. safetensors: the merged weights. timm: a folder that "
            "timm and transformers load."
        ),
    ] = ExportFormat.onnx,
    dynamic_batch: Annotated[
        bool, typer.Option("--dynamic-batch", help="Take any number of images at a time, not one (onnx, pt2).")
    ] = False,
    half: Annotated[
        bool, typer.Option("--half", help="Compute and store in 16 bits; input and output are 32.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            help="Run the files on real images, and print the largest relative difference from the model. "
            "More than 1e-4 (with --half: 0.05) is refused."
        ),
    ] = True,
    images: Annotated[
        str | None, typer.Option(help="Images to verify on.", show_default="those of the run, or the bundled ones")
    ] = None,
    whiten: Annotated[
        str | None,
        typer.Option(
            help="Put the run's map behind the network (onnx, pt2): auto, or a power from 0 to 1.",
            show_default="no map",
        ),
    ] = None,
    map_file: Annotated[
        Path | None, typer.Option("--map", help="File with that map.", show_default="that of the run")
    ] = None,
    combination: Annotated[
        Combination, typer.Option(help="For a cascade: whose vectors; every expert is run in either.")
    ] = Combination.conditional,
    scale: UseScale = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    backbone: UseBackbone = None,
    weights: UseWeights = None,
    size: UseSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Write the adapted network as a file that other programs run, without selfmask.

    The mask is merged into the weights; preprocessing goes with it as metadata. Example:
    selfmask export runs/birds --out birds.onnx --dynamic-batch
    """
    from ..cascade.model import Cascade
    from ..commands.export import check_free, images_of
    from ..commands.export import export as write
    from ..commands.opening import load_embedder
    from ..embedding.mapping import whitened

    console = Console(stderr=as_json)
    path = out or Path(f"model{_ENDING[format]}")
    overwrite = overwrite or _may_replace(path)
    check_free(path, overwrite)
    embedder = load_embedder(what, backbone=backbone, weights=weights, size=size, may_use=may_use)
    if isinstance(cascade := embedder.model, Cascade):
        cascade.scale = cascade.scale if scale is None else scale.value
        embedder = dataclasses.replace(embedder, variant=combination.value)
    if whiten is not None or map_file is not None:
        embedder = whitened(embedder, what, "auto" if whiten is None else whiten, map_file)
    made = write(
        embedder,
        path,
        format.value,
        dynamic_batch=dynamic_batch,
        half=half,
        compare_on=images_of(what, images) if verify else None,
        overwrite=overwrite,
        say=console.say,
    )
    if as_json:
        print_json(dataclasses.asdict(made))
    else:
        console.say(f"{made.bytes:,} bytes written to {path}: images to vectors of length {made.width}")


def _may_replace(path: Path) -> bool:
    """Whether what is there may be replaced: asked at a terminal; elsewhere, no."""
    if not path.exists() or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    return typer.confirm(f"{path} exists. Replace it?", default=False, err=True)
