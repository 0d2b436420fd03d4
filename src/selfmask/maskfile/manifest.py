"""The words in a mask file: everything but the tensors, as one validated JSON document."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from ..errors import CorruptMaskFileError, NotAMaskFileError, UnsupportedVersionError
from ..preprocessing import Preprocessing
from .codecs import CODECS

FORMAT = "selfmask"
VERSION = "1"
_MAX_SIDE = 1 << 14  # of the images that a base takes


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One masked tensor: its shape in the base, how many bits it has, how many of them are on, and its codec."""

    shape: tuple[int, ...]
    bits: int
    active: int
    codec: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a mask file says of itself."""

    creator: str
    base_name: str | None
    fingerprint: str
    preprocessing: Preprocessing | None
    config: dict[str, Any]
    masks: dict[str, TensorEntry]
    mask_sha256: str
    relative_to: str | None
    norm_fingerprint: str | None
    progress: float
    notes: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))


def parse_manifest(metadata: dict[str, str] | None) -> Manifest:
    """Take the metadata of a safetensors file for a manifest, or say why it is none."""
    if not metadata or metadata.get("format") != FORMAT:
        raise NotAMaskFileError(
            "this safetensors file is not a mask file",
            expected=f'metadata "format": "{FORMAT}"',
            found=str((metadata or {}).get("format")),
            todo="give a .smn file written by save_pretrained",
        )
    if metadata.get("version") != VERSION:
        raise UnsupportedVersionError(
            "this release cannot read the format version of this mask file",
            expected=VERSION,
            found=str(metadata.get("version"))[:200],
            todo="upgrade selfmask, or save the mask again with this release",
        )
    try:
        fields = json.loads(metadata["manifest"])
        return _manifest(fields)
    except (KeyError, TypeError, ValueError, RecursionError, AttributeError, OverflowError) as error:
        raise CorruptMaskFileError("the manifest of the mask file is damaged", found=repr(error)[:200]) from error


def _manifest(fields: dict[str, Any]) -> Manifest:
    masks = {_text(name): _entry(entry) for name, entry in fields["masks"].items()}
    if unknown := {entry.codec for entry in masks.values()} - set(CODECS):
        raise UnsupportedVersionError(
            "this mask file uses a codec that this release does not know",
            expected=", ".join(CODECS),
            found=", ".join(sorted(unknown))[:200],
            todo="upgrade selfmask",
        )
    return Manifest(
        creator=_text(fields["creator"]),
        base_name=None if fields["base_name"] is None else _text(fields["base_name"]),
        fingerprint=_hash(fields["fingerprint"]),
        preprocessing=None if fields["preprocessing"] is None else _preprocessing(fields["preprocessing"]),
        config=dict(fields["config"]),
        masks=masks,
        mask_sha256=_hash(fields["mask_sha256"]),
        relative_to=None if fields["relative_to"] is None else _hash(fields["relative_to"]),
        norm_fingerprint=None if fields["norm_fingerprint"] is None else _hash(fields["norm_fingerprint"]),
        progress=_share(fields["progress"]),
        notes=_text(fields["notes"]),
    )


def _entry(fields: dict[str, Any]) -> TensorEntry:
    shape = tuple(_count(size) for size in fields["shape"])
    if len(shape) > 64 or max(shape, default=0) > 2**35:  # before they are multiplied
        raise ValueError("a shape that is too large")
    entry = TensorEntry(shape, _count(fields["bits"]), _count(fields["active"]), _text(fields["codec"]))
    if not entry.active <= entry.bits <= math.prod(shape) < 2**35:
        raise ValueError(f"{entry.active} of {entry.bits} bits active in a tensor of shape {shape}")
    return entry


def _preprocessing(fields: dict[str, Any]) -> Preprocessing:
    height, width = (_count(side) for side in fields["size"])
    if not (1 <= height <= _MAX_SIDE and 1 <= width <= _MAX_SIDE):
        raise ValueError(f"an image size of {height} x {width} pixels")
    mean, std = (tuple(_number(value) for value in fields[key]) for key in ("mean", "std"))
    return Preprocessing((height, width), mean, std, _text(fields["interpolation"]))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text expected, found {value!r}"[:200])
    return value


def _hash(value: object) -> str:
    text = _text(value)
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise ValueError(f"a SHA-256 expected, found {text!r}"[:200])
    return text


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"a count expected, found {value!r}"[:200])
    return value


def _share(value: object) -> float:
    number = _number(value)
    if not 0 <= number <= 1:
        raise ValueError(f"a share expected, found {number}")
    return number


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError(f"a number expected, found {value!r}"[:200])
    return float(value)
