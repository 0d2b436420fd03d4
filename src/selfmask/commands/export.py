"""`export`: an adapted network as files for other programs, compared with the model before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..data import Images, open_images
from ..data.named import BUNDLED
from ..data.pixels import fit, normalised
from ..data.sources import SomeImages
from ..embedding.embedder import Embedder
from ..errors import BadImageError, ExportError, ExportWriteError
from ..export.formats import FORMATS, Files, check_needs
from ..export.network import network_of
from ..files import write_atomically, write_folder
from ..running import evaluating
from .opening import images_of_run

TOLERANCE = {False: 1e-4, True: 5e-2}
"""Largest relative difference of a vector, in float32 and in 16 bits."""
_COMPARED = 16  # images


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written.

    difference: of the vectors of the file and of the model, as a share of the largest number of the vector, at most.
    images: what it was measured on.
    """

    out: str
    format: str
    bytes: int
    width: int
    difference: float | None = None
    images: str | None = None


def export(
    embedder: Embedder,
    out: Path,
    format: str = "onnx",
    *,
    dynamic_batch: bool = False,
    half: bool = False,
    compare_on: Images | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> Exported:
    """Write the network that gives an embedder's vectors, with its map if it has one.

    compare_on: images whose vectors must be those of the embedder; on a larger difference than `TOLERANCE`, nothing is
    written.
    """
    how = FORMATS[_known(format)]
    check_needs(how)
    check_free(out, overwrite)
    network = network_of(embedder, half=half)
    files = how.files(network, dynamic_batch)
    difference = None
    if compare_on is not None:
        pixels, names = _pixels(compare_on, embedder)
        expected = _vectors(embedder, pixels)
        difference = relative_difference(how.run(files, network, pixels), expected)
        say(f"largest relative difference on {len(names)} images: {difference:.2g}")
        if not difference <= TOLERANCE[half]:  # also where it is no number
            raise ExportError(
                "the exported network gives other vectors than the model it was made from",
                expected=f"a relative difference of at most {TOLERANCE[half]:g}",
                found=f"{difference:.3g}",
                todo="nothing was written; try another format" + (", or without --half" if half else ""),
            )
    return Exported(str(out), format, _write(out, files), network.width, difference, _of(compare_on))


def check_free(out: Path, overwrite: bool) -> None:
    """Refuse a name that is taken, unless it may be."""
    if out.exists() and not overwrite:
        raise ExportWriteError(
            f"{out} exists", expected="a name that is not taken", todo="choose another, or give --overwrite"
        )


def images_of(what: str | Path, given: str | None) -> Images:
    """Real images to compare on: those given, the run's own where they still are, or the bundled ones."""
    if given is not None:
        return open_images(given)
    return images_of_run(what) or open_images(next(iter(BUNDLED)), split="test")


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest of any vector, as a share of the vector's largest number."""
    found, expected = found.detach(), expected.detach()
    if found.shape != expected.shape:
        return float("inf")
    return float(((found - expected).abs().amax(1) / expected.abs().amax(1).clamp_min(1e-12)).max())


def _known(format: str) -> str:
    if format not in FORMATS:
        raise ExportError("unknown format", expected=", ".join(FORMATS), found=format)
    return format


def _pixels(images: Images, embedder: Embedder) -> tuple[Tensor, list[str]]:
    """Normalised images on the CPU, from all over the set; those that cannot be read are left out."""
    step = max(1, len(images) // _COMPARED)
    some = SomeImages(images, range(0, len(images), step)[:_COMPARED])
    found, names = list[Tensor](), list[str]()
    for number, name in enumerate(some.names):
        try:
            image = some[number]
        except BadImageError:
            continue
        found.append(normalised(fit(image, embedder.preprocessing), embedder.preprocessing))
        names.append(name)
    if not found:
        raise ExportError("none of the images to compare on can be read", todo="give others: --images")
    return torch.stack(found), names


def _vectors(embedder: Embedder, pixels: Tensor) -> Tensor:
    """As `embed` would give them."""
    device = next(embedder.model.parameters()).device
    with torch.inference_mode(), evaluating(embedder.model):
        vectors: Tensor = embedder.module([embedder.variant])(pixels.to(device))
        return vectors.float().cpu().clone()


def _write(out: Path, files: Files) -> int:
    if set(files) == {""}:
        return write_atomically(out, files[""], ExportWriteError)
    return write_folder(out, files, ExportWriteError)


def _of(images: Images | None) -> str | None:
    return None if images is None else f"{len(images):,} images"
