"""Exported networks against the masked models they were made from: differences on real images, bytes and seconds.

    python -m benchmarks.exporting

Weights of timm's networks are random, because those of others need a network; their masks take a third of the weights
that carry scores, partly at random. One mask is learned. `change` is what the mask does to the vectors, as the same
relative difference: an export that lost the mask would show it. The last column is `torch.export.export(masked, ...)`.
"""

from __future__ import annotations

import dataclasses
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import timm
import torch
from rich.console import Console
from rich.table import Table
from tests.cascade.small import fitted
from tests.clips import small_open_clip, small_transformers
from tests.training.small import HOW
from torch import Tensor, nn

from selfmask import AdaptConfig, MaskConfig, MaskedModel, adapt, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.commands.export import Exported, export, relative_difference
from selfmask.data import Images, open_images
from selfmask.data.pixels import fit, normalised
from selfmask.embedding.embedder import Embedder
from selfmask.embedding.mapping import fit_map, with_map
from selfmask.errors import ExportError
from selfmask.export.formats import FORMATS
from selfmask.preprocessing import IMAGENET, Preprocessing
from selfmask.running import as_vectors

from .common import imagenet_lite0, pairs

IMAGES = "selfmask/fashion"
NETWORKS = ("resnet18", "resnet50", "vit_tiny_patch16_224", "convnext_atto")
BATCH, REPEATS, STEPS = 8, 5, 120
DIRECT = "masked model"  # through torch.export itself
LEARNED = f"selfmask/tiny, learned in {STEPS} steps"


def masked_of(model: nn.Module, share: float = 0.67) -> MaskedModel:
    masked = get_masked_model(model.eval(), MaskConfig(rule="topk", active_share=share))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for score in masked.scores.parameters():
            score.add_(0.5 * score.std() * torch.randn(score.shape, generator=generator))
    return masked.eval()


def embedders(folder: Path) -> Iterator[tuple[str, Embedder]]:
    for name in NETWORKS:
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=0)
        yield name, Embedder(name, masked_of(model), IMAGENET, model.num_features)
    lite0 = imagenet_lite0()
    yield "efficientnet_lite0 (ImageNet)", Embedder("lite0", masked_of(lite0, 0.9), IMAGENET, lite0.num_features)
    for name in ("selfmask/tiny", "selfmask/vit"):
        backbone = load_backbone(name, pretrained=name == "selfmask/tiny")
        yield name, Embedder(name, masked_of(backbone.model), backbone.preprocessing, backbone.width)
    tiny = load_backbone("selfmask/tiny")
    config = AdaptConfig.preset("fast", steps=STEPS, gate=False)  # a mask whatever it is good for
    learned = adapt(tiny.model, IMAGES, config, preprocessing=tiny.preprocessing, report=False).model
    yield LEARNED, Embedder("selfmask/tiny", learned, tiny.preprocessing, tiny.width)
    for clip, file in (small_open_clip(folder), (small_transformers(folder), None)):
        backbone = load_backbone(clip, weights=file)
        own = Embedder(clip, masked_of(backbone.model), backbone.preprocessing, backbone.width)
        yield f"CLIP tower ({clip.partition('/')[0]})", own
    cascade = fitted(folder)
    for variant in ("conditional", "unconditional"):
        yield f"cascade, {variant}", Embedder("cascade", cascade, HOW, cascade.width, variant=variant)


@dataclasses.dataclass(frozen=True)
class Line:
    what: str
    change: float
    differences: dict[str, float]
    bytes: dict[str, int]
    mask_bytes: int
    seconds: tuple[float, float]


def measured(what: str, embedder: Embedder, images: Images, folder: Path) -> Line:
    made: dict[str, Exported] = {}
    for format in FORMATS:
        try:
            file = folder / f"{len(list(folder.iterdir()))}.{format}"
            made[format] = export(embedder, file, format, dynamic_batch=True, compare_on=images, say=lambda _: None)
        except ExportError as error:
            print(f"{what}: {format}: {str(error).splitlines()[0]}")
    x = pixels(images, embedder.preprocessing)
    model = embedder.module([embedder.variant])
    frozen = embedder.module(["frozen"])
    with torch.inference_mode():
        change = relative_difference(model(x), frozen(x))
        run = onnx_session(made["onnx"].out)
        seconds = pairs(lambda: run(x), lambda: model(x), REPEATS)
    masked = embedder.model
    differences = {format: each.difference or 0.0 for format, each in made.items()}
    sizes = {format: each.bytes for format, each in made.items()}
    if isinstance(masked, MaskedModel) and embedder.map is None:
        differences[DIRECT], sizes[DIRECT] = directly(masked, x)
    return Line(
        what,
        change,
        differences,
        sizes,
        len(masked.mask_bytes()) if isinstance(masked, MaskedModel) else masked.save(folder / "cascade.smn"),
        (statistics.median(a for a, _ in seconds), statistics.median(b for _, b in seconds)),
    )


def directly(masked: MaskedModel, x: Tensor) -> tuple[float, int]:
    """The difference and the bytes of a program that `torch.export` makes of the masked model itself."""
    any_batch = {"args": ({0: torch.export.Dim("batch", min=1)},)}
    program = torch.export.export(masked, (x[:2],), dynamic_shapes=any_batch)
    file = io.BytesIO()
    torch.export.save(program, file)
    with torch.no_grad():
        difference = relative_difference(as_vectors(program.module()(x)), as_vectors(masked(x)))
    return difference, len(file.getvalue())


def onnx_session(file: str) -> Callable[[Tensor], object]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"images": x.numpy()})


def pixels(images: Images, how: Preprocessing) -> Tensor:
    return torch.stack([normalised(fit(images[i], how), how) for i in range(BATCH)])


def main() -> None:
    torch.set_num_threads(1)
    images, lines = open_images(IMAGES, split="test"), []
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for what, embedder in embedders(folder):
            lines.append(measured(what, embedder, images, folder))
            if what in (LEARNED, "selfmask/vit"):
                whitened = with_map(embedder, fit_map(embedder, open_images(IMAGES)))
                lines.append(measured(f"{what} + map", whitened, images, folder))
    console = Console(width=150)
    columns = (*FORMATS, DIRECT)
    table = Table("network", "change by the mask", *(f"difference, {each}" for each in columns))
    for line in lines:
        shown = (f"{line.differences[each]:.1e}" if each in line.differences else "-" for each in columns)
        table.add_row(line.what, f"{line.change:.2f}", *shown)
    console.print(table)
    titles = ("mask", "ONNX", "pt2", f"pt2 of the {DIRECT}")
    table = Table("network", *(f"{each}, bytes" for each in titles), "ONNX Runtime, ms", "masked model, ms", "ratio")
    for line in lines:
        ours, other = (1e3 * each for each in line.seconds)
        sizes = (f"{line.bytes[each]:,}" if each in line.bytes else "-" for each in ("onnx", "pt2", DIRECT))
        table.add_row(line.what, f"{line.mask_bytes:,}", *sizes, f"{ours:.1f}", f"{other:.1f}", f"{ours / other:.2f}")
    console.print(table)
    print(f"batches of {BATCH} images, one thread, medians of {REPEATS}; {time.monotonic() - start:.0f} s in all")


if __name__ == "__main__":
    main()
