"""What `predict`, `curate` and `check` find, where the truth is known: labels, planted images, shifted sets.

    python -m benchmarks.verbs RUN IMAGES OTHER [--choose]

RUN is a run folder or a backbone, IMAGES a data set with labels and a test split, OTHER one of other images. Duplicates
are planted: copies of images of the test split, each changed in one way. Outliers are images of OTHER among those of
IMAGES. Sets that are shifted, and sets that are not, are compared with the training split. With --choose, only curate,
at several thresholds.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from typing import NamedTuple, get_args

import numpy as np
import torch
from PIL import Image, ImageEnhance
from rich.console import Console
from rich.table import Table
from torch import Tensor

from selfmask.commands.check import check
from selfmask.commands.curate import WithThumbnails
from selfmask.commands.opening import load_embedder
from selfmask.data import Images, open_images
from selfmask.data.sources import ArrayImages
from selfmask.embedding.embedder import Embedder
from selfmask.embedding.vectors import embed
from selfmask.evaluation.curating import SIMILAR, STRANGE, curated, placed, strangeness_of
from selfmask.evaluation.drift import drift_between
from selfmask.evaluation.predicting import By, learned_from
from selfmask.masking import MaskedModel

PLANTED, OUTLIERS = 20, 20  # copies of each kind, and foreign images
IMAGES_EACH = 1000


def jpeg(picture: Image.Image) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=40)
    return Image.open(file).convert("RGB")


def smaller(picture: Image.Image) -> Image.Image:
    return picture.resize([max(8, side // 2) for side in picture.size], Image.Resampling.BICUBIC)


def cropped(picture: Image.Image) -> Image.Image:
    width, height = picture.size
    return picture.crop((width // 16, height // 16, width - width // 16, height - height // 16))


class Labelled(NamedTuple):
    rows: Tensor
    labels: Tensor


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "the same": lambda picture: picture.copy(),
    "JPEG, quality 40": jpeg,
    "half the size": smaller,
    "brighter": lambda picture: ImageEnhance.Brightness(picture).enhance(1.2),
    "cropped by an eighth": cropped,
    "mirrored": lambda picture: picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


def pictures(images: Images, numbers: range | list[int]) -> list[Image.Image]:
    return [Image.fromarray(images[i].permute(1, 2, 0).numpy()) for i in numbers]


def as_images(parts: list[Image.Image]) -> Images:
    side = parts[0].size
    return ArrayImages(np.stack([np.asarray(part.resize(side)) for part in parts]))


def vectors(embedder: Embedder, images: Images, variant: str = "") -> Tensor:
    return embed(embedder.module([variant or embedder.variant]), images, embedder.preprocessing)[0]


def accuracy(rows: Tensor, labels: Tensor, test: Tensor, truth: Tensor, by: By, k: int = 20) -> float:
    """As `predict` has it, from vectors that were made once."""
    classes = [str(number) for number in range(int(labels.max()) + 1)]
    smallest = int(labels.bincount()[labels.unique()].min())
    found = learned_from(rows, labels, classes, by=by, k=min(k, smallest))(test)
    return float((found.argmax(1) == truth).double().mean())


def predicting(train: Labelled, test: Labelled, table: Table) -> None:
    for each in (5, 20, None):
        numbers = [(train.labels == c).nonzero()[:each, 0] for c in train.labels.unique()]
        chosen = torch.cat(numbers)
        for by in get_args(By):
            share = accuracy(train.rows[chosen], train.labels[chosen], test.rows, test.labels, by)
            table.add_row(f"predict, {len(chosen):,} examples, {by}", f"{share:.1%}", "of test images right")


def planted(test: Images) -> tuple[Images, dict[str, list[tuple[int, int]]]]:
    """Test images and changed copies behind them, with the pairs of each kind."""
    own = pictures(test, range(min(len(test), IMAGES_EACH)))
    copies, pairs = list[Image.Image](), dict[str, list[tuple[int, int]]]()
    for kind, (name, change) in enumerate(CHANGES.items()):
        for number in range(PLANTED * kind, PLANTED * (kind + 1)):
            pairs.setdefault(name, []).append((number, len(own) + len(copies)))
            copies.append(change(own[number]).resize(own[number].size))
    return as_images([*own, *copies]), pairs


def duplicates(embedder: Embedder, test: Images, thresholds: list[float], table: Table) -> None:
    images, pairs = planted(test)
    remembered = WithThumbnails(images)
    rows = vectors(embedder, remembered)
    truth = {frozenset(pair) for each in pairs.values() for pair in each}
    for similar in thresholds:
        found = curated(rows, thumbnails=remembered.thumbnails, similar=similar, label=0).duplicates
        together = [set(group) for group in found]
        for name, each in pairs.items():
            hits = sum(any({a, b} <= group for group in together) for a, b in each)
            table.add_row(
                f"curate, duplicates <= {similar}, {name}", f"{hits / len(each):.0%}", "of planted pairs found"
            )
        linked = {frozenset((a, b)) for group in found for a in group for b in group if a < b}
        extra = len(linked - truth)
        table.add_row(f"curate, duplicates <= {similar}", f"{extra:,}", f"other pairs, among {len(images):,} images")


def outliers(embedder: Embedder, test: Images, other: Images, thresholds: list[float], table: Table) -> None:
    own = pictures(test, range(min(len(test), IMAGES_EACH)))
    step = max(1, len(other) // OUTLIERS)
    foreign = pictures(other, range(0, step * OUTLIERS, step))
    images = as_images([*own, *(each.resize(own[0].size) for each in foreign)])
    rows = vectors(embedder, images)
    for strange in thresholds:
        found = curated(rows, strange=strange, label=0)
        hits = sum(number >= len(own) for number in found.outliers)
        table.add_row(f"curate, outliers > {strange}", f"{hits / len(foreign):.0%}", "of foreign images found")
        wrong = len(found.outliers) - hits
        table.add_row(f"curate, outliers > {strange}", f"{wrong / len(own):.1%}", "of own images called outliers")
    for what, strangeness in {
        "curate, outliers": found.strangeness,
        "the same with half whitened vectors": strangeness_of(placed(rows)),
    }.items():
        mine, theirs = strangeness[: len(own)], strangeness[len(own) :]
        share = float((theirs[:, None] > mine).double().mean())
        table.add_row(what, f"{share:.0%}", "of pairs of a foreign and an own image ranked right")


def labels_first(train: Labelled, test: Labelled, table: Table) -> None:
    """Accuracy with the images that `curate` would label, and with as many at random."""
    for count in (20, 50):
        chosen = [torch.tensor(curated(train.rows, label=count).to_label)]
        chosen += [torch.randperm(len(train.rows), generator=seeded(seed))[:count] for seed in range(5)]
        found = [accuracy(train.rows[each], train.labels[each], test.rows, test.labels, "knn", 1) for each in chosen]
        table.add_row(f"curate, {count} to label, 1-NN", f"{found[0]:.1%}", f"at random {np.mean(found[1:]):.1%}")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shifted(train: Images, test: Images, other: Images) -> dict[str, Images]:
    own = pictures(test, range(min(len(test), IMAGES_EACH)))
    half = len(own) // 2
    labels = torch.tensor(test.labels)
    few = (labels[:IMAGES_EACH] < max(1, (int(labels.max()) + 1) // 2)).nonzero()[:, 0].tolist()
    dark = [ImageEnhance.Brightness(each).enhance(0.7) for each in own]
    return {
        "the same kind (test split)": as_images(own),
        "the same kind, 100 images": as_images(own[:100]),
        "darker": as_images(dark),
        "half of them darker": as_images([*own[:half], *dark[half:]]),
        "half of the classes": as_images([own[i] for i in few]),
        "other images": as_images(pictures(other, range(min(len(other), IMAGES_EACH)))),
    }


def checking(embedder: Embedder, train: Images, test: Images, other: Images, table: Table) -> None:
    old = vectors(embedder, train, "frozen")
    for name, images in shifted(train, test, other).items():
        drift = drift_between(old[: len(images)], vectors(embedder, images, "frozen"))
        verdict = f"{'drifted' if drift.proven() else 'no drift'} (p = {drift.chance:.2g})"
        if isinstance(embedder.model, MaskedModel):
            found = check(embedder, images)
            helps = "helps" if found.helps else "not proven to help"
            verdict += f"; {helps}: gain {found.gain:+.3f}, error {found.gain_error:.3f}"
        table.add_row(f"check, {name}", f"{drift.rate:.1%} ± {drift.error:.1%}", verdict)
    alarms = 0
    for seed in range(100):  # the same images, divided at random: every alarm is false
        order = torch.randperm(len(old), generator=seeded(seed))
        alarms += drift_between(old[order[:300]], old[order[300:600]], seed=seed).proven()
    table.add_row("check, a set divided at random", f"{alarms} of 100", "false alarms of drift")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("images")
    parser.add_argument("other")
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--backbone")
    parser.add_argument("--size", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    embedder = load_embedder(given.run, backbone=given.backbone, size=given.size)
    train, test = (open_images(given.images, split=split) for split in ("train", "test"))
    other = open_images(given.other, split="test")
    table = Table("what", "", "", title=f"{given.run} on {given.images}; others: {given.other}")
    duplicates(embedder, test, [0.1, 0.15, 0.2, 0.25, 0.35] if given.choose else [SIMILAR], table)
    outliers(embedder, test, other, [2.5, 3.5, 5.0, 7.0] if given.choose else [STRANGE], table)
    if not given.choose:
        both = [Labelled(vectors(embedder, each), torch.tensor(each.labels)) for each in (train, test)]
        predicting(*both, table)
        labels_first(*both, table)
        checking(embedder, train, test, other, table)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
