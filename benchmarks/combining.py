"""`python -m benchmarks.combining RUN...`: what the combination of finished cascades does, part by part, with labels.

For cascades of the bundled pictures (`selfmask cascade selfmask/fashion --backbone selfmask/tiny`), one for each seed:
accuracy of the frozen backbone, the dispatcher and both combinations, under every scale; of the frozen backbone and the
dispatcher alone when they are rotated and scaled in the same way, so that one sees what the experts add; and of the
combinations with more or fewer bits for a number of the PCA.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from selfmask import Cascade
from selfmask.backbones import load_backbone
from selfmask.cascade.combination import Combination
from selfmask.cascade.model import CONDITIONAL, DISPATCHER, UNCONDITIONAL, expert_name
from selfmask.data import label_split, open_images
from selfmask.embedding.embedder import FROZEN, Embedder
from selfmask.embedding.vectors import embed
from selfmask.evaluation import knn_accuracy, linear_probe_fit
from selfmask.evaluation.moments import Moments

FEW, CHOICES = 0.01, 5  # share of the labels, and how often they are chosen
Numbers = tuple[float, float, float]
MEASURES = ("k-NN", "probe, all labels", "probe, 1 %")


@dataclasses.dataclass(frozen=True)
class Features:
    """Of all training images or all test images: of the frozen backbone, and e of both combinations."""

    frozen: Tensor
    e: dict[str, Tensor]
    labels: Tensor


def features(cascade: Cascade, split: str) -> Features:
    images, width = open_images("selfmask/fashion", split=split), cascade.width
    first, _ = embed(
        Embedder("", cascade, cascade.preprocessing, cascade.width).module([FROZEN, DISPATCHER]),
        images,
        cascade.preprocessing,
        batch_size=256,
    )
    frozen, dispatcher = first.chunk(2, 1)
    parts = [dispatcher]
    for k in range(cascade.experts):
        cascade.masked.set_mask(expert_name(k))
        parts.append(embed(cascade.masked, images, cascade.preprocessing, batch_size=256)[0])
    every = torch.cat(parts, 1)
    padded = every.clone()
    route = cascade.router(dispatcher)
    for k in range(cascade.experts):
        padded[route != k, width * (1 + k) : width * (2 + k)] = 0
    e = {DISPATCHER: dispatcher, CONDITIONAL: padded, UNCONDITIONAL: every}
    return Features(frozen.contiguous(), e, torch.tensor(images.labels))


def combined(train: Tensor, test: Tensor, width: int, scale: str, bits: int) -> tuple[Tensor, Tensor]:
    """What a combination makes of e; of 8 bits is what we store."""
    moments = Moments(train.shape[1])
    moments.add(train)
    found = moments.principal(width)
    vectors = found.vectors
    if bits == 16:
        vectors = vectors.half().double()
    elif bits < 16:
        steps = vectors.abs().amax(0) / (2 ** (bits - 1) - 1)
        vectors = (vectors / steps).round() * steps
    variances = (vectors * (moments.covariance() @ vectors)).sum(0)
    scales = variances.pow({"whiten": -0.5, "none": 0.0, "eigenvalues": -1.0}[scale])
    if bits == 8:  # the same as the library's, or this table is about something else
        ours = Combination.fit(moments, width, scale)  # type: ignore[arg-type]
        torch.testing.assert_close((vectors * scales).float(), ours.blocks.view(-1, width), rtol=1e-3, atol=1e-5)
    return tuple(((rows.double() - moments.mean) @ vectors * scales).float() for rows in (train, test))  # type: ignore[return-value]


def measured(train: Tensor, labels: Tensor, test: Tensor, truth: Tensor) -> Numbers:
    few = []
    for seed in range(CHOICES):
        chosen = label_split(labels.tolist(), FEW, seed)
        few.append(_probe(train[chosen], labels[chosen], test, truth))
    return knn_accuracy(train, labels, test, truth, k=200), _probe(train, labels, test, truth), statistics.mean(few)


def _probe(train: Tensor, labels: Tensor, test: Tensor, truth: Tensor) -> float:
    return float((linear_probe_fit(train, labels).rank(test)[:, 0] == truth).double().mean())


def numbers_of(folder: str) -> Iterator[tuple[tuple[str, str], Numbers]]:
    """Every row of the table, for one cascade."""
    cascade = Cascade.load(load_backbone("selfmask/tiny").model, Path(folder) / "cascade.smn")
    train, test = features(cascade, "train"), features(cascade, "test")
    e = {"frozen backbone": (train.frozen, test.frozen)} | {name: (train.e[name], test.e[name]) for name in train.e}

    def row(title: str, preprocessing: str, own: Tensor, other: Tensor) -> tuple[tuple[str, str], Numbers]:
        return (title, preprocessing), measured(own, train.labels, other, test.labels)

    for title in ("frozen backbone", DISPATCHER):
        yield row(title, "as it is", *e[title])
    for scale in ("whiten", "none", "eigenvalues"):
        for title, pair in e.items():
            yield row(title, f"{scale}, 8 bits", *combined(*pair, cascade.width, scale, 8))
    for bits in (32, 16, 6, 4):
        for title in (CONDITIONAL, UNCONDITIONAL):
            yield row(title, f"whiten, {bits} bits", *combined(*e[title], cascade.width, "whiten", bits))


def main(folders: list[str]) -> int:
    if not folders:
        print(__doc__)
        return 2
    found: dict[tuple[str, str], list[Numbers]] = {}
    for folder in folders:
        for which, numbers in numbers_of(folder):
            found.setdefault(which, []).append(numbers)
            print(folder, *which, *(f"{number:.4f}" for number in numbers), sep="  ", flush=True)
    table = Table("vectors", "scale", *MEASURES, title=f"Means over {len(folders)} cascades (lowest to highest)")
    for which, rows in found.items():
        columns = [[100 * number for number in column] for column in zip(*rows, strict=True)]
        table.add_row(
            *which, *(f"{statistics.mean(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in columns)
        )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
