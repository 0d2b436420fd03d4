"""The words in a mask file: everything but the tensors, as one validated JSON document."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import zlib
from typing import Any

from .. import checked
from ..errors import CorruptMaskFileError, NotAMaskFileError, UnsupportedVersionError
from ..preprocessing import Preprocessing
from .codecs import CODECS
from .extensions import NORM_CODES, Extension, parse_extensions

FORMAT = "selfmask"
VERSION = "2"
"""What is written. Version 1 is read, too: its fingerprint covers the masked weights alone."""
VERSIONS = ("1", VERSION)
MAX_MASKS = 10_000
_MAX_WEIGHTS = 2**35


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One masked tensor: its shape in the base, how many bits it has, how many of them are on, and its codec."""

    shape: tuple[int, ...]
    bits: int
    active: int
    codec: str
    bytes: int | None = None
    """Of its coded mask, among those of all in one tensor; None in earlier files, where it has a tensor of its own."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a mask file says of itself."""

    creator: str
    base_name: str | None
    fingerprint: str
    """Of the masked weights."""
    preprocessing: Preprocessing | None
    config: dict[str, Any]
    masks: dict[str, TensorEntry]
    mask_sha256: str
    relative_to: str | None
    norm_fingerprint: str | None
    progress: float
    notes: str
    base_fingerprint: str | None = None
    """Of all that a checkpoint of the base holds; None where it was never known: in files of version 1."""
    base_tensors: int | None = None
    """How many tensors that are."""
    tables_fingerprint: str | None = None
    """Of the base's buffers that are not persistent; None if it has none."""
    extensions: dict[str, Extension] = dataclasses.field(default_factory=dict)
    version: str = VERSION
    """Of the format."""

    @property
    def joined(self) -> bool:
        """Whether the coded masks are in one tensor."""
        return all(entry.bytes is not None for entry in self.masks.values())

    def to_text(self) -> str:
        """As it stands in a file: JSON, compressed, since most of it are names and digits that come again and again."""
        fields = dataclasses.asdict(self)
        del fields["version"]  # stands beside the manifest, not in it
        return compressed_json(fields)


def parse_manifest(metadata: dict[str, str] | None) -> Manifest:
    """Take the metadata of a safetensors file for a manifest, or say why it is none."""
    if not metadata or metadata.get("format") != FORMAT:
        raise NotAMaskFileError(
            "this safetensors file is not a mask file",
            expected=f'metadata "format": "{FORMAT}"',
            found=str((metadata or {}).get("format"))[:200],
            todo="give a .smn file written by save_pretrained; a pack of masks is for `selfmask masks`",
        )
    version = metadata.get("version", "")
    check_version("mask file", version)
    try:
        text = checked.member(metadata, "manifest")
        return manifest_of(checked.mapping(checked.document(text if version == "1" else plain_json(text))), version)
    except ValueError as error:
        raise CorruptMaskFileError("the manifest of the mask file is damaged", found=str(error)[:200]) from error


def check_version(what: str, version: str) -> None:
    if version not in VERSIONS:
        raise UnsupportedVersionError(
            f"this release cannot read the format version of this {what}",
            expected=" or ".join(VERSIONS),
            found=version[:200] or "none",
            todo="upgrade selfmask, or make the file again with this release",
        )


def compressed_json(fields: Any) -> str:
    """JSON as it stands in a file."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def hashed_words(file_format: str, version: str, words: str) -> str:
    """What the "sha256" of a file covers besides its tensors; since version 2 also what the file says that it is."""
    return words if version == "1" else f"{file_format} {version}\n{words}"


def plain_json(text: str) -> str | bytes:
    """The JSON of a manifest; it is compressed but in earlier files. No more is unpacked than a document may have."""
    if text.startswith("{"):
        return text
    packed, unpacker = base64.b64decode(text, validate=True), zlib.decompressobj()
    try:
        unpacked = unpacker.decompress(packed, checked.MAX_DOCUMENT + 1)
    except zlib.error as error:
        raise ValueError(f"the manifest cannot be decompressed: {error}") from error
    if len(unpacked) <= checked.MAX_DOCUMENT and (not unpacker.eof or unpacker.unused_data):
        raise ValueError("the compressed manifest ends too early or too late")
    return unpacked


def manifest_of(fields: dict[str, Any], version: str = VERSION) -> Manifest:
    """A manifest out of its JSON object; a ValueError where it is none."""

    def get(name: str) -> Any:
        return checked.member(fields, name)

    masks = {name: _entry(entry, version) for name, entry in checked.mapping(get("masks"), most=MAX_MASKS).items()}
    if unknown := {entry.codec for entry in masks.values()} - set(CODECS):
        raise UnsupportedVersionError(
            "this mask file uses a codec that this release does not know",
            expected=", ".join(CODECS),
            found=", ".join(sorted(unknown))[:200],
            todo="upgrade selfmask",
        )
    manifest = Manifest(
        creator=checked.text(get("creator")),
        base_name=checked.optional(get("base_name"), checked.text),
        fingerprint=checked.sha256(get("fingerprint")),
        preprocessing=checked.optional(get("preprocessing"), Preprocessing.of_json),
        config=checked.plain(checked.mapping(get("config")), most=2 * MAX_MASKS),
        masks=masks,
        mask_sha256=checked.sha256(get("mask_sha256")),
        relative_to=checked.optional(get("relative_to"), checked.sha256),
        norm_fingerprint=checked.optional(get("norm_fingerprint"), checked.sha256),
        progress=checked.share(get("progress")),
        notes=checked.text(get("notes"), most=checked.MAX_DOCUMENT),
        version=version,
    )
    if version == "1":
        return manifest
    manifest = dataclasses.replace(
        manifest,
        base_fingerprint=checked.optional(get("base_fingerprint"), checked.sha256),
        base_tensors=checked.optional(get("base_tensors"), checked.count),
        tables_fingerprint=checked.optional(get("tables_fingerprint"), checked.sha256),
        extensions=parse_extensions(get("extensions")),
    )
    if not manifest.joined and any(entry.bytes is not None for entry in masks.values()):
        raise ValueError("some masks are in one tensor, others have their own")
    if NORM_CODES in manifest.extensions and (manifest.norm_fingerprint or not manifest.base_fingerprint):
        raise ValueError("statistics are coded as steps from those of a base that nobody checks, or that it keeps")
    return manifest


def _entry(value: object, version: str) -> TensorEntry:
    fields = checked.mapping(value, most=4 if version == "1" else 5)
    shape = checked.items(checked.member(fields, "shape"), lambda side: checked.count(side, most=_MAX_WEIGHTS), most=64)
    bits, active = (checked.count(checked.member(fields, key)) for key in ("bits", "active"))
    length = None if version == "1" else checked.optional(fields.get("bytes"), checked.count)
    entry = TensorEntry(shape, bits, active, checked.text(checked.member(fields, "codec"), most=100), length)
    if length is not None and length > -(-bits // 8):
        raise ValueError(f"a mask of {bits} bits is coded in {length} bytes")
    if not entry.active <= entry.bits <= math.prod(shape) < _MAX_WEIGHTS:
        raise ValueError(f"{entry.active} of {entry.bits} bits active in a tensor of shape {shape}"[:200])
    return entry
