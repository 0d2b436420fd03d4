"""`curate`: near-duplicates, outliers, and which images to label first, as lists and as one page with pictures."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import Images, SomeImages
from ..data.identity import SHORT, short_hashes
from ..data.resizing import resize
from ..embedding.embedder import Embedder
from ..embedding.vectors import Progress, embed
from ..errors import EvaluationError, FeaturesWriteError
from ..evaluation.curating import SIDE, SIMILAR, STRANGE, curated
from ..files import write_atomically

LIST, WORDS, PAGE = "images.csv", "curation.json", "curation.html"
"""The files of the folder: a row an image; groups and lists; pictures."""


@dataclasses.dataclass(frozen=True)
class Curated:
    """By name: groups of near-duplicates, outliers with their strangeness, and what to label first."""

    images: int
    bad: list[tuple[str, str]]
    duplicates: list[list[str]]
    outliers: list[tuple[str, float]]
    to_label: list[str]

    @property
    def superfluous(self) -> int:
        return sum(len(group) - 1 for group in self.duplicates)


def curate(
    embedder: Embedder,
    images: Images,
    out: Path,
    *,
    title: str = "",
    similar: float = SIMILAR,
    strange: float = STRANGE,
    label: int = 20,
    seed: int = 0,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> Curated:
    """Look through the images, and write what was found to a folder. No image is moved, changed or deleted."""
    module = embedder.module([embedder.variant])
    remembered = WithThumbnails(images)
    rows, kept = embed(module, remembered, embedder.preprocessing, batch_size=batch_size, progress=progress)
    if not kept:
        raise EvaluationError(f"none of the {len(images):,} images could be read", todo="check the images")
    hashes = short_hashes(images)
    own = [hashes[SHORT * number : SHORT * (number + 1)] for number in kept]
    found = curated(
        rows,
        hashes=own,
        thumbnails=remembered.thumbnails[kept],
        similar=similar,
        strange=strange,
        label=label,
        seed=seed,
    )
    names = [images.names[number] for number in kept]
    readable = {*kept}
    result = Curated(
        len(images),
        [(images.names[i], "could not be read") for i in range(len(images)) if i not in readable],
        [[names[i] for i in group] for group in found.duplicates],
        [(names[i], float(found.strangeness[i])) for i in found.outliers],
        [names[i] for i in found.to_label],
    )
    lines = _rows(names, found.duplicates, found.strangeness.tolist(), {*found.outliers}, found.to_label)
    _write(out / LIST, lines)
    words: dict[str, Any] = dataclasses.asdict(result) | {
        "similar": similar,
        "strange": strange,
        "model": embedder.name,
    }
    write_atomically(out / WORDS, json.dumps(words, indent=2).encode(), FeaturesWriteError)
    _write_page(out / PAGE, title or f"{len(images):,} images", images, kept, found, result)
    return result


class WithThumbnails(SomeImages):
    """Images that leave a small grey copy behind when they are loaded, so that nothing is decoded twice."""

    def __init__(self, images: Images) -> None:
        super().__init__(images, range(len(images)))
        self.thumbnails = torch.zeros(len(images), SIDE, SIDE)

    def load(self, i: int, *, near: int | None = None) -> Tensor:
        image = super().load(i, near=near)
        self.thumbnails[i] = resize(image, SIDE, SIDE, "bilinear").float().mean(0)
        return image


def _rows(
    names: list[str], groups: list[list[int]], strangeness: list[float], outliers: set[int], to_label: list[int]
) -> str:
    """The list: every image with its group, what it is a duplicate of, its strangeness and its place in the queue."""
    group_of = {number: place for place, group in enumerate(groups, 1) for number in group}
    kept = {number: group[0] for group in groups for number in group[1:]}
    queue = {number: place for place, number in enumerate(to_label, 1)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", "group", "duplicate_of", "strangeness", "outlier", "label_first"])
    for number, name in enumerate(names):
        duplicate_of = names[kept[number]] if number in kept else ""
        outlier = "yes" if number in outliers else ""
        cells = [name, group_of.get(number, ""), duplicate_of, f"{strangeness[number]:.3f}", outlier]
        writer.writerow([*cells, queue.get(number, "")])
    return text.getvalue()


def _write(path: Path, text: str) -> None:
    write_atomically(path, text.encode("utf-8", "backslashreplace"), FeaturesWriteError)


def _write_page(path: Path, title: str, images: Images, kept: list[int], found: Any, result: Curated) -> None:
    from ..report.curation import Picture, write_curation  # here, because matplotlib takes its time

    def picture(number: int, note: str = "") -> Picture:
        own = kept[number]
        return Picture(lambda: images.load(own, near=256), images.names[own], note)

    write_curation(
        path,
        title,
        result.images,
        len(result.bad),
        [[picture(i) for i in group] for group in found.duplicates],
        [picture(i, f"{found.strangeness[i]:.1f}") for i in found.outliers],
        [picture(i) for i in found.to_label],
    )
