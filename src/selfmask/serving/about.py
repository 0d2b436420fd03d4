"""What a collection says of itself, `collection.json`: taken only as what it is expected to be.

collection.json             what it is, and the size and hash of every other file
items.safetensors           names, labels, where thumbnails end, which images are on the planes
thumbnails.bin              JPEGs, one after the other
vectors-N.safetensors       of space N: one for each image, of length 1
map-N.safetensors           what the vectors of space N went through, and those of queries must
graph-N.safetensors         the approximate index of space N, where the collection is large
plane-N.safetensors         some images of space N as points on a plane, to be looked at
run-N/                      the mask (or cascade, or tuned weights) of space N, as a run folder has it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import checked
from ..evaluation.feature_map import MadeFor
from ..files import RunFile
from ..preprocessing import Preprocessing

FORMAT, VERSION = "selfmask-collection", 1
ABOUT, ITEMS, THUMBNAILS = "collection.json", "items.safetensors", "thumbnails.bin"
RUN_FILES = (RunFile.CONFIG, RunFile.MASK, RunFile.CASCADE, RunFile.TUNED)
MAX_IMAGES, MAX_SPACES, MAX_CLASSES, MAX_WIDTH = 100_000_000, 64, 100_000, 1 << 16
MAX_NAME = 1 << 12
"""Bytes of the name of an image, letters of any other."""
_MAX_FILE = 1 << 44


class FileAbout(NamedTuple):
    """One file of a collection."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class SpaceAbout:
    """Vectors of one kind: of the frozen backbone, or of one run.

    kind: what an embedder calls the variant. power: of the map they went through; None for none.
    """

    name: str
    title: str
    kind: str
    width: int
    made_for: MadeFor
    power: float | None

    @property
    def is_frozen(self) -> bool:
        return self.kind == "frozen"


@dataclasses.dataclass(frozen=True)
class About:
    """A collection in words and numbers.

    sampled: how many images are on the planes. backbone, weights: what the frozen vectors are of, where there is no run
    to load it with. size: of the images, where it was asked for.
    """

    title: str
    images: int
    sampled: int
    classes: tuple[str, ...] | None
    spaces: tuple[SpaceAbout, ...]
    files: Mapping[str, FileAbout]
    backbone: str | None = None
    weights: str | None = None
    size: int | None = None


def vectors_file(number: int) -> str:
    return f"vectors-{number}.safetensors"


def map_file(number: int) -> str:
    return f"map-{number}.safetensors"


def graph_file(number: int) -> str:
    return f"graph-{number}.safetensors"


def plane_file(number: int) -> str:
    return f"plane-{number}.safetensors"


def run_folder(number: int) -> str:
    return f"run-{number}"


def read_about(folder: Path) -> About:
    """What the collection says of itself, all of it checked; an OSError or a ValueError says what is wrong."""
    fields = checked.mapping(checked.document(checked.content(folder / ABOUT)))
    if fields.get("format") != FORMAT:
        raise ValueError(f"{ABOUT} is not that of a collection")
    if fields.get("version") != VERSION:
        raise ValueError(f"a collection of version {fields.get('version')!r:.20}; this release reads version {VERSION}")
    images = checked.count(checked.member(fields, "images"), least=1, most=MAX_IMAGES)
    files = checked.mapping(checked.member(fields, "files"))
    about = About(
        title=_name(checked.member(fields, "title")),
        images=images,
        sampled=checked.count(checked.member(fields, "sampled"), most=images),
        classes=checked.optional(
            checked.member(fields, "classes"), lambda value: checked.items(value, _name, most=MAX_CLASSES)
        ),
        spaces=checked.items(checked.member(fields, "spaces"), _space, most=MAX_SPACES),
        files={name: _file(value) for name, value in files.items()},
        backbone=checked.optional(checked.member(fields, "backbone"), _name),
        weights=checked.optional(checked.member(fields, "weights"), _name),
        size=checked.optional(
            checked.member(fields, "size"), lambda value: checked.count(value, least=1, most=MAX_WIDTH)
        ),
    )
    if not about.spaces or len({space.name for space in about.spaces}) != len(about.spaces):
        raise ValueError("spaces of different names expected")
    _check_files(about)
    return about


def as_json(about: About) -> dict[str, Any]:
    """What `collection.json` says."""
    spaces = []
    for space in about.spaces:
        fields = dataclasses.asdict(space)
        spaces.append({**fields, **fields.pop("made_for")})
    files = {name: file._asdict() for name, file in about.files.items()}
    return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(about), "spaces": spaces, "files": files}


def _name(value: object) -> str:
    return checked.text(value, most=MAX_NAME)


def _space(value: object) -> SpaceAbout:
    fields = checked.mapping(value)
    return SpaceAbout(
        name=_name(checked.member(fields, "name")),
        title=_name(checked.member(fields, "title")),
        kind=_name(checked.member(fields, "kind")),
        width=checked.count(checked.member(fields, "width"), least=1, most=MAX_WIDTH),
        made_for=MadeFor(
            checked.sha256(checked.member(fields, "model")),
            Preprocessing.of_json(checked.member(fields, "preprocessing")),
        ),
        power=checked.optional(checked.member(fields, "power"), checked.share),
    )


def _file(value: object) -> FileAbout:
    fields = checked.mapping(value, most=2)
    size = checked.count(checked.member(fields, "bytes"), most=_MAX_FILE)
    return FileAbout(size, checked.sha256(checked.member(fields, "sha256")))


def _check_files(about: About) -> None:
    """The files are those that such a collection has: none is missing, and none has a name of the file's choice."""
    needed, allowed = {ITEMS, THUMBNAILS}, set[str]()
    for number, space in enumerate(about.spaces):
        needed |= {vectors_file(number)} | ({map_file(number)} if space.power is not None else set())
        allowed |= {graph_file(number), plane_file(number)}
        if not space.is_frozen:
            allowed |= {f"{run_folder(number)}/{name}" for name in RUN_FILES}
    if odd := (needed - set(about.files)) | (set(about.files) - needed - allowed):
        raise ValueError(f"other files than those of a collection: {', '.join(sorted(odd))[:200]}")
