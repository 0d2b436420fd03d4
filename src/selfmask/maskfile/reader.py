"""Reading mask files. Nothing is trusted: every size is checked before memory is asked for.

A mask file is a safetensors file (`docs/format.md`): "mask.NAME" coded bits, "lzma" the stream that tensors of
that codec share, "norm.NAME" batch-norm statistics, "head.NAME" an optional head, and a manifest as metadata.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ConfigError, CorruptMaskFileError, NotAMaskFileError, RelativeMaskError, WrongBaseError
from . import codecs
from .fingerprint import Fingerprints
from .layout import SHARED, PathLike, content_hash, same_bits
from .manifest import Manifest, parse_manifest
from .mask import PackedMask

_MAX_HEADER = 8 << 20  # a mask of 10,000 tensors needs about 2 MB; the safetensors limit of 100 MB is generous
_DAMAGED = "fetch or write the file again"


def read_mask_file(
    path: PathLike,
    *,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    fingerprints: Fingerprints,
    bit_weights: Callable[[PackedMask], Mapping[str, Tensor]],
    references: Iterable[PackedMask] = (),
) -> PackedMask:
    """Read a mask for a base with these parameters and batch-norm `buffers`.

    `bit_weights` gives the flat base weights that carry the bits of a mask (known by its config alone), and
    `references` are the masks at hand that a relative file may refer to.
    """
    path = Path(path)
    with _opened(path) as (file, manifest):
        _check_base(manifest, parameters, buffers, fingerprints)
        stored = _check_tensors(file, manifest, buffers)
        mask = PackedMask(
            bits={},
            sizes={name: entry.bits for name, entry in manifest.masks.items()},
            shapes={name: entry.shape for name, entry in manifest.masks.items()},
            config=manifest.config,
            norm={},
            fingerprint=manifest.fingerprint,
            base_name=manifest.base_name,
            preprocessing=manifest.preprocessing,
            notes=manifest.notes,
            norm_fingerprint=manifest.norm_fingerprint,
        )
        try:
            weights = bit_weights(mask)
        except ConfigError as error:
            raise CorruptMaskFileError("the mask file has settings that cannot work", found=error.what) from error
        for name, weight in weights.items():
            if weight.numel() != mask.sizes[name]:
                raise CorruptMaskFileError(
                    f"the wrong number of bits for {name}",
                    expected=weight.numel(),
                    found=mask.sizes[name],
                    todo=_DAMAGED,
                )
        tensors = {key: file.get_tensor(key) for key in stored}
        _check_content(file, tensors)
    reference = _reference(manifest, references)
    empty = torch.empty(0, dtype=torch.uint8)
    coded = {name: (entry.codec, _bytes(tensors[f"mask.{name}"])) for name, entry in manifest.masks.items()}
    bits = codecs.decode((coded, _bytes(tensors.get(SHARED, empty))), mask.sizes, weights)
    if reference is not None:
        bits = {name: same_bits(same, reference.bits[name], mask.sizes[name]) for name, same in bits.items()}
    mask = mask.replaced(
        bits=bits,
        norm={
            name: tensors[f"norm.{name}"].to(buffers[name].device).clone()
            for name in buffers
            if f"norm.{name}" in tensors
        },
        head={key.removeprefix("head."): value.clone() for key, value in tensors.items() if key.startswith("head.")},
    )
    _check_mask(mask, manifest)
    return mask


def inspect_mask_file(path: PathLike) -> tuple[Manifest, dict[str, int]]:
    """The manifest of a file and the bytes of each part of it, checked as far as is possible without the base."""
    path = Path(path)
    with _opened(path) as (file, manifest):
        stored = _check_tensors(file, manifest, None)
        _check_content(file, {key: file.get_tensor(key) for key in stored})
        parts = {"file": path.stat().st_size, "masks": 0, "norm": 0, "head": 0}
        for key, part in stored.items():
            kind = key.partition(".")[0]
            parts["masks" if kind in ("mask", SHARED) else kind] += part.nbytes
        parts["words"] = parts["file"] - parts["masks"] - parts["norm"] - parts["head"]
    return manifest, parts


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Manifest]]:
    """The file mapped into memory, with its manifest; nothing of its data is read yet."""
    try:
        with path.open("rb") as start:
            header = int.from_bytes(start.read(8), "little")
            size = os.fstat(start.fileno()).st_size
    except OSError as error:
        raise NotAMaskFileError(
            f"cannot read {path}", expected="a .smn file", found=error.strerror, todo="check the path"
        ) from error
    if size < 8 or header > size - 8:
        raise NotAMaskFileError(
            f"{path} is not a safetensors file, or is cut off",
            expected=f"a header of {header} bytes",
            found=f"{size} bytes in all",
            todo=_DAMAGED,
        )
    if header > _MAX_HEADER:
        raise CorruptMaskFileError(
            f"the header of {path} is too large", expected=f"at most {_MAX_HEADER} bytes", found=header, todo=_DAMAGED
        )
    try:
        with safe_open(path, framework="pt") as file:
            yield file, parse_manifest(file.metadata())
    except SafetensorError as error:
        raise CorruptMaskFileError(
            f"{path} is damaged", expected="a valid safetensors file", found=error, todo=_DAMAGED
        ) from error


def _check_base(
    manifest: Manifest, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], fingerprints: Fingerprints
) -> None:
    """Names and shapes first, then the bytes of the weights."""
    todo = f"load the mask on {manifest.base_name or 'the base it was learned on'}, with the same weights"
    for name, entry in manifest.masks.items():
        if name not in parameters:
            raise WrongBaseError("the mask is for another base", expected=f"a parameter {name}", todo=todo)
        if (shape := tuple(parameters[name].shape)) != entry.shape:
            raise WrongBaseError(
                "the mask is for another base", expected=f"{name} of {entry.shape}", found=shape, todo=todo
            )
    if not manifest.masks:
        raise CorruptMaskFileError("the mask file masks nothing", todo=_DAMAGED)
    found = fingerprints.of({name: parameters[name] for name in manifest.masks})
    if found != manifest.fingerprint:
        raise WrongBaseError(
            "the mask was learned on other weights of this architecture",
            expected=f"fingerprint {manifest.fingerprint[:16]}",
            found=found[:16],
            todo=todo,
        )
    if manifest.norm_fingerprint is not None:
        found = Fingerprints().of(buffers)
        if found != manifest.norm_fingerprint:
            raise WrongBaseError(
                "the base has other batch-norm statistics than the mask was learned with",
                expected=f"fingerprint {manifest.norm_fingerprint[:16]}",
                found=found[:16],
                todo=todo,
            )


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor of the file as its header describes it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _WIDTH[self.dtype]


_WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def _check_tensors(file: Any, manifest: Manifest, buffers: Mapping[str, Tensor] | None) -> dict[str, _Stored]:
    """Every tensor of the file is one we expect, of the size we expect; without a base, as far as we can know."""
    stored = {key: _describe(key, file.get_slice(key)) for key in file.keys()}  # noqa: SIM118 (not a dict)
    wanted = {f"mask.{name}" for name in manifest.masks}
    if any(entry.codec == codecs.LZMA for entry in manifest.masks.values()):
        wanted.add(SHARED)
    if buffers is not None and manifest.norm_fingerprint is None:
        wanted |= {f"norm.{name}" for name in buffers}
    optional = {key for key in stored if key.startswith("head.") or (buffers is None and key.startswith("norm."))}
    if missing := sorted(wanted - set(stored)):
        found = f"{len(missing)} missing"
        raise CorruptMaskFileError("tensors are missing", expected=missing[0], found=found, todo=_DAMAGED)
    if extra := sorted(set(stored) - wanted - optional):
        raise CorruptMaskFileError("tensors that do not belong", found=extra[0][:200], todo=_DAMAGED)

    most = {f"mask.{name}": -(-entry.bits // 8) for name, entry in manifest.masks.items()}
    most[SHARED] = sum(most.values())
    for key, limit in most.items():
        if key in stored and (stored[key].dtype != "U8" or stored[key].nbytes > limit):
            expected = f"U8, at most {limit} bytes"
            raise CorruptMaskFileError(f"{key} is not what it should be", expected=expected, found=stored[key])
    for name, buffer in (buffers or {}).items():
        expected_norm = _Stored("F32", tuple(buffer.shape))
        if stored.get(f"norm.{name}", expected_norm) != expected_norm:
            found_norm = stored[f"norm.{name}"]
            raise WrongBaseError(f"the statistics {name} differ in shape", expected=expected_norm, found=found_norm)
    floats = sum(4 * math.prod(entry.shape) for entry in manifest.masks.values())
    if (head := sum(part.nbytes for key, part in stored.items() if key.startswith("head."))) > floats:
        raise CorruptMaskFileError("the head is larger than the base", expected=f"at most {floats} bytes", found=head)
    return stored


def _describe(key: str, part: Any) -> _Stored:
    if part.get_dtype() not in _WIDTH:
        raise CorruptMaskFileError(f"{key} has a type no mask file uses", found=part.get_dtype(), todo=_DAMAGED)
    return _Stored(part.get_dtype(), tuple(part.get_shape()))


def _check_content(file: Any, tensors: Mapping[str, Tensor]) -> None:
    metadata = file.metadata()
    found = content_hash(metadata["manifest"], tensors)
    if found != metadata.get("sha256"):
        raise CorruptMaskFileError(
            "the content of the mask file was altered",
            expected=f"SHA-256 {str(metadata.get('sha256'))[:16]}",
            found=found[:16],
            todo=_DAMAGED,
        )


def _reference(manifest: Manifest, references: Iterable[PackedMask]) -> PackedMask | None:
    if manifest.relative_to is None:
        return None
    known = list(references)
    for reference in known:
        sizes = {name: entry.bits for name, entry in manifest.masks.items()}
        if reference.sha256 == manifest.relative_to and reference.sizes == sizes:
            return reference
    raise RelativeMaskError(
        "this file stores only the difference to another mask, which is not at hand",
        expected=f"a mask with SHA-256 {manifest.relative_to[:16]}",
        found=", ".join(reference.sha256[:16] for reference in known) or "none",
        todo="load that mask first, or give its file: relative_to=...",
    )


def _check_mask(mask: PackedMask, manifest: Manifest) -> None:
    for name, entry in manifest.masks.items():
        if mask.active[name] != entry.active:
            raise CorruptMaskFileError(
                f"the mask of {name} is damaged",
                expected=f"{entry.active} weights on",
                found=mask.active[name],
                todo=_DAMAGED,
            )
    if mask.sha256 != manifest.mask_sha256:
        raise CorruptMaskFileError(
            "the mask is damaged", expected=manifest.mask_sha256[:16], found=mask.sha256[:16], todo=_DAMAGED
        )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
