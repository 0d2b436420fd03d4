"""Batch-norm statistics in few bits: bytes, and what the rounding costs in accuracy; and bytes of whole files.

    python -m benchmarks.statistics PART ... [--images NAME]   PART: files, resnet18, lite0

Masks of backbones with real weights are adapted as `fast` does, for 60 steps and without the gate, so that there is a
mask to measure. k-NN (k = 20, of the training images among the test images and the other way round) is measured with
the statistics as they were learned, and rounded as files have them, at several numbers of bits. Data sets are those of
tools/small_sets.py and tools/photo_sets.py, in the folder that SELFMASK_DATA names; weights are in the folder that
SELFMASK_WEIGHTS names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from unittest import mock

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, adapt, get_masked_model
from selfmask.data import Images, open_images
from selfmask.embedding.vectors import embed
from selfmask.evaluation import knn_accuracy
from selfmask.maskfile import inspect_mask_file, norm_codes
from selfmask.masking.norms import norm_buffers, saved_statistics
from selfmask.preprocessing import Preprocessing

from .common import SIZE, Row, as_table, digits, imagenet_lite0
from .gate import FAST, backbone_named, randomly

BACKBONES, IMAGES = ("resnet18", "lite0"), "small-five"
STEPS, K = 60, 20
BITS = (5, 6, 7)
OFF = 0.0003  # the share of weights that `fast` switches off in a ResNet-50


def accuracy_rows(console: Console, name: str, images: str) -> list[Row]:
    """Statistics of an adapted mask: their bytes, and k-NN with them and without the rounding."""
    table = Table(
        *("backbone", "images", "off", "bits", "float32", "coded", "ratio", "k-NN exact", "coded", "points"),
        title=f"Statistics after {STEPS} steps of `fast`",
    )
    rows = []
    for bits, line, ratio, points in measured(name, images):
        table.add_row(name, images, *line)
        if bits == norm_codes.MEAN_BITS:
            rows.append(Row(f"{name}, {images}: bytes of statistics / float32", line[3], line[2], ratio, 0.25))
            rows.append(Row(f"{name}, {images}: change of k-NN, points", line[6], line[5], abs(points), 0.1))
    console.print(table)
    return rows


def measured(name: str, images: str) -> Iterator[tuple[int, list[str], float, float]]:
    model, preprocessing = backbone_named(name)
    parts = [open_images(images, split=split) for split in ("train", "test")]
    config = FAST.changed(steps=STEPS, gate=False, size=preprocessing.size[0])
    masked = adapt(model, parts[0], config, preprocessing=preprocessing, report=False).model
    own, exact = (saved_statistics(each) for each in (norm_buffers(masked.base), masked._statistics("default")))
    merged = masked.merge_and_unload().eval()
    size = sum(4 * value.numel() for value in exact.values())
    off = f"{1 - masked.sparsity()['total']:.2%}"

    def knn(statistics: dict[str, Tensor]) -> float:
        merged.load_state_dict(statistics, strict=False)
        return nearest(merged, parts, preprocessing)

    before = knn(exact)
    for bits in BITS:
        with mock.patch.multiple(norm_codes, MEAN_BITS=bits, VARIANCE_BITS=bits):
            near = norm_codes.rounded(exact, own)
            coded = len(norm_codes.encode(near, own)[0])
        after = knn(near)
        numbers = [f"{size:,}", f"{coded:,}", f"{coded / size:.3f}", f"{before:.2f}", f"{after:.2f}"]
        yield bits, [off, str(bits), *numbers, f"{after - before:+.2f}"], coded / size, after - before


def nearest(model: nn.Module, parts: list[Images], preprocessing: Preprocessing) -> float:
    """k-NN in percent, of each part among the other, over all images: the more, the less chance counts."""
    vectors = [embed(model, part, preprocessing)[0] for part in parts]
    labels = [torch.tensor(part.labels) for part in parts]
    right = 0.0
    for bank, queries in ((0, 1), (1, 0)):
        accuracy = knn_accuracy(vectors[bank], labels[bank], vectors[queries], labels[queries], k=K)
        right += accuracy * len(labels[queries])
    return 100 * right / sum(map(len, labels))


def file_rows() -> list[Row]:
    """Whole files: of a mask as sparse as those of `fast`, and of masks that leave all weights on."""
    torch.manual_seed(0)
    resnet50 = on_digits(timm.create_model("resnet50", num_classes=0, zero_init_last=False))
    masked = get_masked_model(resnet50, MaskConfig(norm="anchored"))
    batch = [digits(SIZE)[0][64:192]]
    masked.anchor(batch)
    randomly(masked, OFF, 0)
    masked.recalibrate(batch)
    parts = inspect_mask_file(masked.eval().mask_bytes())[1]
    plain = sum(4 * value.numel() for value in saved_statistics(norm_buffers(resnet50)).values())
    told = f"resnet50 (random), {1 - masked.sparsity()['total']:.2%} off"
    rows = [
        Row(f"{told}: bytes of statistics / float32", f"{parts['norm']:,}", f"{plain:,}", parts["norm"] / plain, 0.25),
        Row(f"{told}: bytes of the file / 100,000", f"{parts['file']:,}", "100,000", parts["file"] / 1e5, 1.0),
    ]
    for name, model in (
        ("resnet18", timm.create_model("resnet18", num_classes=0)),
        ("resnet50", resnet50),
        ("efficientnet_lite0 (ImageNet)", imagenet_lite0()),
    ):
        size = len(identity(model).mask_bytes())
        limit = 1.0 if name == "resnet18" else None
        rows.append(Row(f"{name}, all weights on: bytes of the file / 2,000", f"{size:,}", "2,000", size / 2000, limit))
    return rows


def identity(model: nn.Module) -> MaskedModel:
    return get_masked_model(model, MaskConfig(norm="anchored")).eval()


@torch.no_grad()
def on_digits(model: nn.Module) -> nn.Module:
    """A network with statistics of its own: random weights come with those of no images."""
    for images in digits(SIZE)[0][192:].split(128):
        model.train()(images)
    return model.eval()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="+", choices=["files", *BACKBONES])
    parser.add_argument("--images", default=IMAGES)
    console, rows, given = Console(width=150), list[Row](), parser.parse_args()
    for part in given.part:
        rows += file_rows() if part == "files" else accuracy_rows(console, part, given.images)
    console.print(as_table(rows))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
