"""The words in a pack, as one validated JSON document; and which tensors go with them.

Masks that share all but their content are of one kind, which is told once: a manifest as in mask files, without what is
of one mask alone. Of each mask there is its name, its kind, how many of its bits are on, the bytes that its bits take,
and what of its manifest is not as its kind has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .. import checked
from ..errors import CorruptMaskFileError, NotAMaskFileError
from .container import Stored
from .extensions import NORM_CODES, PREFIX, Extension, owner, parse_extensions
from .layout import NAME
from .manifest import VERSION, Manifest, check_version, compressed_json, manifest_of, plain_json

FORMAT = "selfmask-pack"
"""Its version is that of mask files."""
BITS, HASHES, NORM, FILE = "bits", "hashes", "norm.", "file."
MAX_PACKED, _MAX_KINDS = 10_000, 1000
BLOCK = 64
"""Masks whose statistics are in one stream."""
_PREFIX = 5  # bytes before the coded bits of a tensor, at most
_NOBODY = "0" * 64  # the hash in a kind, which is of no mask


@dataclasses.dataclass(frozen=True)
class Entry:
    """One mask of a pack. kind: None for one that is there as its file. own: what it has other than its kind."""

    name: str
    kind: int | None = None
    active: int = 0
    bytes: int = 0
    own: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Words:
    """What a pack says of itself."""

    creator: str
    kinds: tuple[Manifest, ...]
    entries: tuple[Entry, ...]
    extensions: dict[str, Extension] = dataclasses.field(default_factory=dict)

    def manifest(self, entry: Entry, sha256: str) -> Manifest:
        """Of a mask that is coded here, with this hash."""
        assert entry.kind is not None
        kind = self.kinds[entry.kind]
        own = dict(entry.own)
        if "extensions" in own:
            own["extensions"] = kind.extensions | own["extensions"]
        return dataclasses.replace(kind, mask_sha256=sha256, **own)

    @property
    def with_statistics(self) -> int:
        """How many masks have coded ones."""
        return sum(entry.kind is not None and has_statistics(self.kinds[entry.kind]) for entry in self.entries)

    def to_text(self) -> str:
        kinds = [dataclasses.asdict(kind) for kind in self.kinds]
        for kind in kinds:
            del kind["version"]
        entries = []
        for entry in self.entries:
            fields: dict[str, Any] = {"name": entry.name}
            if entry.kind is not None:
                own = {
                    key: {name: dataclasses.asdict(each) for name, each in value.items()} if key == _OWN[-1] else value
                    for key, value in entry.own.items()
                }
                fields |= {"kind": entry.kind, "active": entry.active, "bytes": entry.bytes, **own}
            entries.append(fields)
        document = {"creator": self.creator, "kinds": kinds, "masks": entries, "extensions": {}}
        return compressed_json(document)


_OWN = ("notes", "progress", "extensions")


def kind_of(manifest: Manifest) -> tuple[Manifest, dict[str, Any]]:
    """The manifest of a kind, of what is in that of a mask; and the rest, which is of the mask alone."""
    own: dict[str, Any] = {"notes": manifest.notes, "progress": manifest.progress}
    own["extensions"] = {name: each for name, each in manifest.extensions.items() if name != NORM_CODES}
    ours = {name: each for name, each in manifest.extensions.items() if name == NORM_CODES}
    masks = {
        name: dataclasses.replace(entry, active=0, codec="raw", bytes=None) for name, entry in manifest.masks.items()
    }
    kind = dataclasses.replace(manifest, notes="", progress=0.0, extensions=ours, masks=masks, mask_sha256=_NOBODY)
    return kind, {key: value for key, value in own.items() if value != getattr(kind, key) and value != {}}


def has_statistics(kind: Manifest) -> bool:
    return NORM_CODES in kind.extensions


def parse_words(name: str, metadata: Mapping[str, str]) -> Words:
    """Take the metadata of a file for that of a pack, or say why it is none."""
    if metadata.get("format") != FORMAT:
        raise NotAMaskFileError(
            f"{name} is not a pack of masks",
            expected=f'metadata "format": "{FORMAT}"',
            found=str(metadata.get("format"))[:200],
            todo="give a file that `selfmask masks pack` wrote",
        )
    check_version("pack", metadata.get("version", ""))
    try:
        checked.one_of(metadata["version"], (VERSION,))
        fields = checked.mapping(checked.document(plain_json(checked.member(metadata, "about"))))
        kinds = checked.items(checked.member(fields, "kinds"), _kind, most=_MAX_KINDS)
        entries = checked.items(checked.member(fields, "masks"), lambda value: _entry(value, kinds), most=MAX_PACKED)
        if not entries or len({entry.name for entry in entries}) != len(entries):
            raise ValueError("no masks, or two of one name")
        creator = checked.printable(checked.member(fields, "creator"), most=200)
        return Words(creator, kinds, entries, parse_extensions(checked.member(fields, "extensions")))
    except ValueError as error:
        raise CorruptMaskFileError("the words of the pack are damaged", found=str(error)[:200]) from error


def _kind(value: object) -> Manifest:
    kind = manifest_of(checked.mapping(value))
    own = (kind.notes, kind.progress, kind.mask_sha256, kind.relative_to)
    if own != ("", 0.0, _NOBODY, None) or kind.joined or set(kind.extensions) - {NORM_CODES}:
        raise ValueError("a kind of masks says what is of one mask alone")
    return kind


def _entry(value: object, kinds: tuple[Manifest, ...]) -> Entry:
    fields = checked.mapping(value, most=8)
    name = checked.text(checked.member(fields, "name"), most=100)
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:50]!r} is no name of a mask")
    if "kind" not in fields:
        return Entry(name)
    kind = checked.count(fields["kind"], most=len(kinds) - 1)
    size = checked.count(checked.member(fields, "bytes"), most=most_coded(kinds[kind]))
    own = {key: _READ[key](fields[key]) for key in _OWN if key in fields}
    return Entry(name, kind, checked.count(checked.member(fields, "active")), size, own)


_READ: dict[str, Callable[[object], Any]] = {
    "notes": lambda value: checked.text(value, most=checked.MAX_DOCUMENT),
    "progress": checked.share,
    "extensions": parse_extensions,
}


def most_coded(kind: Manifest) -> int:
    """The bytes that the bits of a mask take at most."""
    return sum(_PREFIX + -(-entry.bits // 8) for entry in kind.masks.values())


def check_table(table: Mapping[str, Stored], words: Words) -> None:
    """Before any of them is read: the tensors are those that the words call for, as far as can be known."""
    count = len(words.entries)
    blocks = {f"{NORM}{number}" for number in range(-(-words.with_statistics // BLOCK))}
    files = {f"{FILE}{number}" for number, entry in enumerate(words.entries) if entry.kind is None}
    wanted = {BITS, HASHES} | blocks | files
    if missing := sorted(wanted - set(table)):
        raise CorruptMaskFileError("tensors are missing from the pack", expected=missing[0], found=len(missing))
    if extra := sorted(key for key in set(table) - wanted if owner(key) not in words.extensions):
        raise CorruptMaskFileError("the pack contains tensors that do not belong in it", found=extra[0][:200])
    shapes = {HASHES: (count, 32), BITS: (sum(entry.bytes for entry in words.entries),)}
    for key in wanted:
        stored, shape = table[key], shapes.get(key)
        if (
            stored.dtype != "U8"
            or len(stored.shape) != (2 if key == HASHES else 1)
            or shape not in (None, stored.shape)
        ):
            raise CorruptMaskFileError(f"{key} has the wrong type or size", expected=f"U8 of {shape}", found=stored)
    size = sum(stored.nbytes for key, stored in table.items() if key.startswith(PREFIX))
    if size > (most := sum(table[key].nbytes for key in wanted)):
        raise CorruptMaskFileError("the extensions of the pack are too large", expected=f"at most {most}", found=size)
