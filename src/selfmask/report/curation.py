"""The page of `curate`: near-duplicates, outliers and what to label first, in pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from ..files import write_atomically
from .examples import BUDGET, SIDES, Thumbnail, thumbnail
from .figures import DARK, LIGHT
from .page import template

MAX_GROUPS, MAX_MEMBERS, MAX_PICTURES = 24, 8, 48


@dataclasses.dataclass(frozen=True)
class Picture:
    """One image of the page: how to get it, its name and a remark."""

    load: Callable[[], Tensor]
    name: str
    note: str = ""


def write_curation(
    path: Path,
    title: str,
    images: int,
    bad: int,
    duplicates: Sequence[Sequence[Picture]],
    outliers: Sequence[Picture],
    to_label: Sequence[Picture],
) -> None:
    """Write the page, whole or not at all; it needs no network."""
    page = render(title, images, bad, duplicates, outliers, to_label)
    write_atomically(path, page.encode("utf-8", "backslashreplace"))


def render(
    title: str,
    images: int,
    bad: int,
    duplicates: Sequence[Sequence[Picture]],
    outliers: Sequence[Picture],
    to_label: Sequence[Picture],
) -> str:
    shown = [
        *(picture for group in duplicates[:MAX_GROUPS] for picture in group[:MAX_MEMBERS]),
        *outliers[:MAX_PICTURES],
        *to_label[:MAX_PICTURES],
    ]
    ready = _thumbnails(shown)
    return template("curation.html").render(
        title=title,
        light=LIGHT,
        dark=DARK,
        images=images,
        bad=bad,
        superfluous=sum(len(group) - 1 for group in duplicates),
        groups=[
            ([ready[id(picture)] for picture in group[:MAX_MEMBERS]], len(group)) for group in duplicates[:MAX_GROUPS]
        ],
        group_count=len(duplicates),
        outliers=[(ready[id(picture)], picture.note) for picture in outliers[:MAX_PICTURES]],
        outlier_count=len(outliers),
        to_label=[ready[id(picture)] for picture in to_label[:MAX_PICTURES]],
        label_count=len(to_label),
    )


def _thumbnails(pictures: Sequence[Picture]) -> dict[int, Thumbnail]:
    """As large as the page's budget allows; each image is decoded once."""
    loaded = [picture.load() for picture in pictures]
    made: list[str] = []
    for side in SIDES:
        made = [thumbnail(image, side) for image in loaded]
        if sum(map(len, made)) <= BUDGET:
            break
    pairs = zip(pictures, made, strict=True)
    return {id(picture): Thumbnail(uri, picture.name, None) for picture, uri in pairs}
