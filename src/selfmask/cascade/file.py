"""Cascade files: one safetensors file that holds mask files, the router and both combinations.

"dispatcher" and "expert.K" are the bytes of mask files (docs/format.md), an expert's relative to the dispatcher;
"router.NAME", "conditional.NAME" and "unconditional.NAME" are tensors; a short JSON document is in the metadata.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..errors import (
    CorruptCascadeError,
    CorruptMaskFileError,
    NotAMaskFileError,
    RelativeMaskError,
    UnsupportedVersionError,
)
from ..files import write_atomically
from ..maskfile import Manifest, inspect_mask_file
from ..maskfile.layout import MAX_HEADER, content_hash
from ..maskfile.writer import in_one_order
from ..masking import MaskedModel
from .combination import Combination
from .config import MAX_EXPERTS
from .model import COMBINATIONS, DISPATCHER, Cascade, expert_name
from .router import Router

FORMAT, VERSION = "selfmask-cascade", "1"
_TYPES = {"U8", "I8", "F16", "F32"}
_MAX_WIDTH, _MAX_WORD = 1 << 20, 200


@dataclasses.dataclass(frozen=True)
class CascadeAbout:
    """What a cascade file says of itself, and the bytes of its parts."""

    creator: str
    experts: int
    width: int
    settings: dict[str, Any]
    manifest: Manifest
    """Of the dispatcher's mask: base, preprocessing and so on."""
    parts: dict[str, int]


def write_cascade(path: str | Path, cascade: Cascade) -> int:
    """Write the cascade atomically; return the file's size. The same cascade gives the same bytes."""
    masked = cascade.masked
    tensors: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "mask.smn"
        for name, key in _masks(cascade.experts).items():
            masked.set_mask(name)
            masked.save_pretrained(file, relative_to=None if name == DISPATCHER else DISPATCHER)
            tensors[key] = torch.from_numpy(np.fromfile(file, np.uint8))
    tensors |= {f"router.{name}": value for name, value in cascade.router.tensors().items()}
    for name in COMBINATIONS:
        tensors |= {f"{name}.{key}": value for key, value in cascade.combinations[name].tensors().items()}
    about = json.dumps(
        {
            **{"creator": f"selfmask {version('selfmask')}", "experts": cascade.experts, "width": cascade.width},
            "settings": {**cascade.settings, "scale": cascade.scale},
        },
        sort_keys=True,
    )
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    metadata = {"format": FORMAT, "version": VERSION, "about": about, "sha256": content_hash(about, tensors)}
    return write_atomically(Path(path), in_one_order(save(tensors, metadata)))


def read_cascade(model: nn.Module, path: str | Path) -> Cascade:
    """The cascade of a file, on its base, in eval mode."""
    about, tensors = _read(Path(path))
    experts, width = about["experts"], about["width"]
    groups = {name: _group(tensors, name) for name in ("router", *COMBINATIONS)}
    router = Router.of(groups["router"], width, experts)
    combinations = {name: Combination.of(groups[name], width, experts) for name in COMBINATIONS}
    with _unpacked(tensors, experts) as files:
        with _named(path, DISPATCHER):
            masked = MaskedModel.from_pretrained(model, files[DISPATCHER], name=DISPATCHER)
        for name, file in files.items():
            if name != DISPATCHER:
                with _named(path, name):
                    masked.load_mask(file, name)
    if (how := masked.preprocessing) is None:
        raise CorruptCascadeError("the dispatcher does not say how to prepare images", expected="preprocessing")
    device = next(masked.base.parameters()).device
    return Cascade(masked, router, combinations, how, about["settings"]).eval().to(device)


def inspect_cascade(path: str | Path) -> CascadeAbout:
    """What a file says of itself, checked as far as is possible without the base."""
    about, tensors = _read(Path(path))
    parts = {"file": Path(path).stat().st_size}
    parts |= {key: tensors[key].nbytes for key in _masks(about["experts"]).values()}
    for name in ("router", *COMBINATIONS):
        parts[name] = sum(value.nbytes for value in _group(tensors, name).values())
    experts, width = about["experts"], about["width"]
    Router.of(_group(tensors, "router"), width, experts)
    for name in COMBINATIONS:
        Combination.of(_group(tensors, name), width, experts)
    with _unpacked(tensors, experts) as files:
        for name, file in files.items():
            with _named(path, name):
                inspect_mask_file(file)
        manifest, _ = inspect_mask_file(files[DISPATCHER])
    return CascadeAbout(about["creator"], about["experts"], about["width"], about["settings"], manifest, parts)


def is_cascade(path: Path) -> bool:
    """Whether a file says that it is a cascade; not whether it is sound."""
    try:
        if not _header_fits(path):
            return False
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("format") == FORMAT
    except (SafetensorError, OSError):
        return False


def _header_fits(path: Path) -> bool:
    """Whether the header is within bounds: to read a larger one would fill memory."""
    with path.open("rb") as start:
        header, size = int.from_bytes(start.read(8), "little"), os.fstat(start.fileno()).st_size
    return header <= min(MAX_HEADER, size - 8)


def _masks(experts: int) -> dict[str, str]:
    """The names of the masks, the dispatcher's first, and the keys that they are stored under."""
    return {DISPATCHER: "dispatcher", **{expert_name(k): f"expert.{k}" for k in range(experts)}}


def _group(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """All of the file, whole, as it is: coded masks are for the reader of mask files."""
    try:
        if not _header_fits(path):
            raise CorruptCascadeError(f"{path} is no cascade file, or is cut off")
        with safe_open(path, "pt") as file:
            about = _about(path, file.metadata() or {})
            keys = sorted(file.keys())
            if odd := {file.get_slice(key).get_dtype() for key in keys} - _TYPES:
                raise CorruptCascadeError("tensors of an odd type", expected=sorted(_TYPES), found=sorted(odd))
            tensors = {key: file.get_tensor(key) for key in keys}
            metadata = file.metadata()
    except OSError as error:
        raise NotAMaskFileError(
            f"cannot read {path}",
            expected="a cascade file (.smn)",
            found=error.strerror or error,
            todo="check the path",
        ) from error
    except SafetensorError as error:
        raise CorruptCascadeError(f"{path} is damaged", expected="a valid safetensors file", found=error) from error
    if (found := content_hash(metadata["about"], tensors)) != (expected := str(metadata.get("sha256"))):
        raise CorruptCascadeError(f"the content of {path} was altered", expected=expected[:16], found=found[:16])
    masks = set(_masks(about["experts"]).values())
    if missing := sorted(masks - set(tensors)):
        raise CorruptCascadeError("masks are missing", expected=missing[0], found=f"{len(missing)} missing")
    names = ("router", *COMBINATIONS)
    if extra := [key for key in tensors if key not in masks and key.partition(".")[0] not in names]:
        raise CorruptCascadeError("tensors that do not belong", found=extra[0][:200])
    if odd_masks := [key for key in masks if tensors[key].dtype != torch.uint8 or tensors[key].ndim != 1]:
        raise CorruptCascadeError("a mask that is no file", found=min(odd_masks))
    return about, tensors


def _about(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise NotAMaskFileError(
            f"{path} is no cascade file", expected=f'metadata "format": "{FORMAT}"', found=str(metadata.get("format"))
        )
    if metadata.get("version") != VERSION:
        raise UnsupportedVersionError(
            "this cascade is of a format version that this release does not read",
            expected=VERSION,
            found=str(metadata.get("version"))[:200],
            todo="upgrade selfmask",
        )
    try:
        about = json.loads(metadata["about"])
        experts, width, creator, settings = (about[key] for key in ("experts", "width", "creator", "settings"))
        if type(experts) is not int or type(width) is not int or type(creator) is not str or type(settings) is not dict:
            raise TypeError("of the wrong kind")
        if not (1 <= experts <= MAX_EXPERTS and 1 <= width <= _MAX_WIDTH):
            raise ValueError(f"{experts} experts of width {width}")
        words = [creator, *settings, *(value for value in settings.values() if not isinstance(value, int | float))]
        if not all(isinstance(word, str) and word.isprintable() and len(word) < _MAX_WORD for word in words):
            raise ValueError("words that cannot be shown")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptCascadeError("what the cascade says of itself is damaged", found=repr(error)[:200]) from error
    return {"experts": experts, "width": width, "creator": creator, "settings": settings}


@contextmanager
def _named(path: str | Path, name: str) -> Iterator[None]:
    """Errors of a mask within name the cascade, not a file that is there for a moment."""
    try:
        yield
    except (NotAMaskFileError, CorruptMaskFileError, RelativeMaskError) as error:
        raise CorruptCascadeError(f"the {name} in {path} cannot be read", found=error.found) from error


@contextmanager
def _unpacked(tensors: Mapping[str, Tensor], experts: int) -> Iterator[dict[str, Path]]:
    """The masks as files, for the reader of mask files, which trusts nothing."""
    with tempfile.TemporaryDirectory() as place:
        files = {}
        for number, (name, key) in enumerate(_masks(experts).items()):
            files[name] = Path(place) / f"{number}.smn"
            files[name].write_bytes(tensors[key].numpy().tobytes())
        yield files
