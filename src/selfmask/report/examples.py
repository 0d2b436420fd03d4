"""Example images of a report: queries and their nearest neighbours, as thumbnails small enough for one page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from ..errors import ConfigError

MAX_QUERIES, MAX_NEIGHBOURS = 12, 8
SIDES = (96, 72, 56, 40, 28)  # pixels: the largest at which all thumbnails stay below the budget
BUDGET = 1_200_000  # bytes of the page


@dataclass(frozen=True)
class NeighbourLabels:
    """The classes of the images in `Neighbours`, in the same order: they decide which frames say "right"."""

    queries: Sequence[str]
    before: Sequence[Sequence[str]]
    after: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Neighbours:
    """Example images with their nearest neighbours, before (frozen backbone) and after; uint8 images [3, H, W]."""

    queries: Sequence[Tensor]
    before: Sequence[Sequence[Tensor]]
    after: Sequence[Sequence[Tensor]]
    labels: NeighbourLabels | None = None


@dataclass(frozen=True)
class Thumbnail:
    """An image ready for the page. `right`: is it of its query's class? None without labels."""

    uri: str
    label: str
    right: bool | None


@dataclass(frozen=True)
class Card:
    """One query with its two rows of neighbours."""

    query: Thumbnail
    before: list[Thumbnail]
    after: list[Thumbnail]

    @property
    def size(self) -> int:
        return sum(len(each.uri) for each in (self.query, *self.before, *self.after))


def cards(neighbours: Neighbours | None) -> list[Card]:
    """What the page shows of the examples; the thumbnails are as large as the page's budget allows."""
    if neighbours is None:
        return []
    made: list[Card] = []
    for side in SIDES:
        made = [_card(neighbours, index, side) for index in range(min(MAX_QUERIES, len(neighbours.queries)))]
        if sum(card.size for card in made) <= BUDGET:
            break
    return made


def thumbnail(image: Tensor, side: int) -> str:
    """The image as a PNG data URI, made smaller to fit `side`, never larger."""
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3 or not image.numel():
        raise ConfigError(
            "a report cannot show this image",
            expected="uint8 [3, height, width]",
            found=f"{image.dtype} {list(image.shape)}",
            todo="scale the image to 0..255 and convert it to torch.uint8, with the three channels first",
        )
    picture = Image.fromarray(image.detach().cpu().permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _card(neighbours: Neighbours, index: int, side: int) -> Card:
    labels = neighbours.labels
    query = None if labels is None else labels.queries[index]

    def row(images: Sequence[Tensor], names: Sequence[str] | None) -> list[Thumbnail]:
        if names is None:
            return [Thumbnail(thumbnail(image, side), "", None) for image in images[:MAX_NEIGHBOURS]]
        pairs = list(zip(images, names, strict=True))[:MAX_NEIGHBOURS]
        return [Thumbnail(thumbnail(image, side), str(name), name == query) for image, name in pairs]

    return Card(
        Thumbnail(thumbnail(neighbours.queries[index], side), "" if query is None else str(query), None),
        row(neighbours.before[index], None if labels is None else labels.before[index]),
        row(neighbours.after[index], None if labels is None else labels.after[index]),
    )
