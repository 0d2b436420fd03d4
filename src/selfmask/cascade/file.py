"""Cascade files: one safetensors file that holds mask files, the router and both combinations.

"dispatcher" and "expert.K" are the bytes of mask files (docs/format.md), an expert's relative to the dispatcher;
"router.NAME", "conditional.NAME" and "unconditional.NAME" are tensors; a short JSON document is in the metadata.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import checked
from ..errors import (
    CorruptCascadeError,
    CorruptMaskFileError,
    MaskFileError,
    NotAMaskFileError,
    RelativeMaskError,
)
from ..files import write_atomically
from ..maskfile import Container, Extension, Manifest, OpenedMask, Source, open_container
from ..maskfile.container import container_bytes
from ..maskfile.extensions import PREFIX, owner, parse_extensions
from ..maskfile.manifest import VERSION, check_version, hashed_words
from .combination import COMBINATIONS, Combination
from .config import MAX_EXPERTS
from .router import Router

FORMAT = "selfmask-cascade"
"""Its version is that of mask files."""
_TYPES = {"router.mean": "F16", "router.components": "F16"} | {f"{name}.codes": "I8" for name in COMBINATIONS}
"""Of tensors that are neither masks (U8) nor of 32 bits."""
_MAX_WIDTH, _MAX_WORD = 1 << 20, 200


@dataclasses.dataclass(frozen=True)
class _Words:
    """What a cascade file says of itself."""

    creator: str
    experts: int
    width: int
    settings: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class CascadeAbout(_Words):
    """And what it holds: the manifest of its dispatcher's mask (base, preprocessing and so on), bytes of its parts."""

    manifest: Manifest
    parts: dict[str, int]


@dataclasses.dataclass(frozen=True)
class _Document(_Words):
    """And what else may be in it."""

    extensions: dict[str, Extension]


@dataclasses.dataclass(frozen=True)
class OpenedCascade:
    """A cascade file that was read, whole: all of it but the masks is known to be sound."""

    name: str
    creator: str
    settings: dict[str, Any]
    masks: list[OpenedMask]
    """The dispatcher's and those of the experts, from memory; what is wrong with one is found when it is read."""
    router: Router
    combinations: dict[str, Combination]
    parts: dict[str, int]

    def about(self) -> CascadeAbout:
        """What the file says of itself, with all checked that can be without the base."""
        for number, mask in enumerate(self.masks):
            with self.reading(number):
                mask.checked()
        experts, width = self.router.experts, len(self.router.mean)
        return CascadeAbout(self.creator, experts, width, self.settings, self.masks[0].manifest, self.parts)

    def reading(self, number: int) -> AbstractContextManager[None]:
        """Within, errors of a mask name the cascade, and the mask by its place."""
        return _named(self.name, number)


def write_cascade(
    path: str | Path,
    *,
    masks: Sequence[bytes],
    router: Mapping[str, Tensor],
    combinations: Mapping[str, Mapping[str, Tensor]],
    width: int,
    settings: Mapping[str, Any],
) -> int:
    """Write a cascade atomically; return the file's size. The same cascade gives the same bytes.

    `masks` are the bytes of mask files, the dispatcher's first; the rest is what router and combinations store.
    """
    keys = _masks(len(masks) - 1)
    tensors = {
        key: torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for key, data in zip(keys, masks, strict=True)
    }
    tensors |= {f"router.{name}": value for name, value in router.items()}
    for name in COMBINATIONS:
        tensors |= {f"{name}.{key}": value for key, value in combinations[name].items()}
    about = json.dumps(
        {
            "creator": f"selfmask {version('selfmask')}",
            "experts": len(masks) - 1,
            "width": width,
            "settings": dict(settings),
            "extensions": {},
        },
        sort_keys=True,
    )
    metadata = {"format": FORMAT, "version": VERSION, "about": about}
    return write_atomically(Path(path), container_bytes(tensors, metadata, hashed=hashed_words(FORMAT, VERSION, about)))


def open_cascade(source: Source | Container) -> OpenedCascade:
    """Read a cascade file once, into memory. Whatever is wrong is found here; with its masks, when they are read."""
    with open_container(source) as file:
        about = _about(file.name, file.metadata)
        _check_table(file, about)
        try:
            tensors = file.read(hashed_words(FORMAT, file.metadata["version"], file.metadata["about"]))
        except CorruptMaskFileError as error:
            raise CorruptCascadeError(error.what, expected=error.expected, found=error.found) from error
    experts, width = about.experts, about.width
    groups = {name: _group(tensors, name) for name in ("router", *COMBINATIONS)}
    keys = _masks(experts)
    masks = []
    for number, key in enumerate(keys):
        with _named(file.name, number):
            masks.append(OpenedMask(tensors[key].numpy().data))
    return OpenedCascade(
        file.name,
        about.creator,
        about.settings,
        masks,
        Router.of(groups["router"], width, experts),
        {name: Combination.of(groups[name], width, experts) for name in COMBINATIONS},
        {
            "file": file.size,
            **{key: tensors[key].nbytes for key in keys},
            **{name: sum(value.nbytes for value in group.values()) for name, group in groups.items()},
        },
    )


def inspect_cascade(source: Source | Container) -> CascadeAbout:
    """What a file says of itself, checked as far as is possible without the base."""
    return open_cascade(source).about()


def is_cascade(source: Source | Container) -> bool:
    """Whether a file says that it is a cascade; not whether it is sound. A container stays open."""
    try:
        if isinstance(source, Container):
            return source.metadata.get("format") == FORMAT
        with open_container(source) as file:
            return is_cascade(file)
    except MaskFileError:
        return False


def _masks(experts: int) -> list[str]:
    """The keys that the masks are stored under, the dispatcher's first."""
    return ["dispatcher", *(f"expert.{k}" for k in range(experts))]


def _group(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}


def _check_table(file: Container, about: _Document) -> None:
    """Before any of them is read: the tensors are those of a cascade, as far as names, types and sizes tell."""
    masks, names = set(_masks(about.experts)), ("router", *COMBINATIONS)
    if missing := sorted(masks - set(file.table)):
        raise CorruptCascadeError(
            "masks are missing from the file", expected=missing[0], found=f"{len(missing)} missing"
        )
    for key, stored in file.table.items():
        if key.partition(".")[0] in names and stored.dtype != (wanted := _TYPES.get(key, "F32")):
            raise CorruptCascadeError(f"{key[:200]} has an unexpected type", expected=wanted, found=stored.dtype)
    others = [key for key in file.table if key not in masks and key.partition(".")[0] not in names]
    if extra := [key for key in others if owner(key) not in about.extensions]:
        raise CorruptCascadeError("the file contains tensors that do not belong in it", found=extra[0][:200])
    size = sum(stored.nbytes for key, stored in file.table.items() if key.startswith(PREFIX))
    if size > (most := sum(file.table[key].nbytes for key in masks)):
        raise CorruptCascadeError("the extensions of the file are too large", expected=f"at most {most}", found=size)
    if odd_masks := [key for key in masks if file.table[key].dtype != "U8" or len(file.table[key].shape) != 1]:
        raise CorruptCascadeError("a mask in the file is not a mask file", found=min(odd_masks))


def _about(name: str, metadata: Mapping[str, str]) -> _Document:
    if metadata.get("format") != FORMAT:
        raise NotAMaskFileError(
            f"{name} is not a cascade file",
            expected=f'metadata "format": "{FORMAT}"',
            found=str(metadata.get("format"))[:200],
        )
    version = metadata.get("version", "")
    check_version("cascade", version)
    try:
        fields = checked.mapping(checked.document(checked.member(metadata, "about")))
        return _Document(
            checked.printable(checked.member(fields, "creator"), most=_MAX_WORD),
            checked.count(checked.member(fields, "experts"), least=1, most=MAX_EXPERTS),
            checked.count(checked.member(fields, "width"), least=1, most=_MAX_WIDTH),
            {
                checked.printable(key, most=_MAX_WORD): _setting(value)
                for key, value in checked.mapping(checked.member(fields, "settings")).items()
            },
            {} if version == "1" else parse_extensions(checked.member(fields, "extensions")),
        )
    except ValueError as error:
        raise CorruptCascadeError("the metadata of the cascade is damaged", found=str(error)[:200]) from error


def _setting(value: object) -> str | float:
    """A word or a number; whole numbers and flags as they are."""
    if isinstance(value, str):
        return checked.printable(value, most=_MAX_WORD)
    checked.number(int(value) if isinstance(value, bool) else value)
    return value  # type: ignore[return-value]


@contextmanager
def _named(cascade: str, number: int) -> Iterator[None]:
    try:
        yield
    except (NotAMaskFileError, CorruptMaskFileError, RelativeMaskError) as error:
        mask = "dispatcher" if number == 0 else f"expert {number - 1}"
        raise CorruptCascadeError(f"the {mask} in {cascade} cannot be read", found=error.found) from error
