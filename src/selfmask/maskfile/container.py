"""Reading and writing mask files. Reading trusts nothing: every size is checked before memory is asked for.

A mask file is a safetensors file (`docs/format.md`): "mask.NAME" coded bits, "lzma" the stream that tensors of
that codec share, "norm.NAME" batch-norm statistics, "head.NAME" an optional head, and a manifest as metadata.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import (
    ConfigError,
    CorruptMaskFileError,
    MaskWriteError,
    NotAMaskFileError,
    RelativeMaskError,
    WrongBaseError,
)
from . import codecs
from .fingerprint import Fingerprints, as_bytes
from .manifest import FORMAT, VERSION, Manifest, TensorEntry, parse_manifest
from .mask import Bits, PackedMask

PathLike = str | os.PathLike[str]
_MAX_HEADER = 8 << 20  # a mask of 10,000 tensors needs about 2 MB; the safetensors limit of 100 MB is generous
_SHARED = "lzma"
_DAMAGED = "fetch or write the file again"


# ---- writing ----------------------------------------------------------------------------------------------------


def write_mask_file(
    path: PathLike, mask: PackedMask, weights: Mapping[str, Tensor], *, relative_to: PackedMask | None = None
) -> int:
    """Write a mask atomically; return the file's size. `weights` are the flat base weights that carry bits."""
    bits = mask.bits if relative_to is None else _difference(mask, relative_to)
    coded, shared = codecs.encode(bits, mask.sizes, weights)
    tensors = {f"mask.{name}": _as_tensor(payload) for name, (_, payload) in coded.items()}
    if shared:
        tensors[_SHARED] = _as_tensor(shared)
    tensors |= {f"norm.{name}": value.detach().cpu().float().contiguous() for name, value in mask.norm.items()}
    tensors |= {f"head.{name}": value.detach().cpu().contiguous().clone() for name, value in mask.head.items()}
    manifest = Manifest(
        creator=f"selfmask {version('selfmask')}",
        base_name=mask.base_name,
        fingerprint=mask.fingerprint,
        preprocessing=mask.preprocessing,
        config=mask.config,
        masks={
            name: TensorEntry(mask.shapes[name], mask.sizes[name], mask.active[name], codec)
            for name, (codec, _) in coded.items()
        },
        mask_sha256=mask.sha256,
        relative_to=None if relative_to is None else relative_to.sha256,
        norm_fingerprint=mask.norm_fingerprint,
        notes=mask.notes,
    ).to_json()
    metadata = {"format": FORMAT, "version": VERSION, "manifest": manifest}
    metadata["sha256"] = _content_hash(manifest, tensors)
    return write_atomically(Path(path), save(tensors, metadata))


def write_atomically(path: Path, data: bytes) -> int:
    """Write beside, flush to disk, then rename: whatever happens, `path` is the old file or the new one, whole."""
    temporary = None
    try:
        if path.is_dir():
            raise IsADirectoryError("this is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise MaskWriteError(
            f"cannot write {path}",
            expected="a file name in a folder that can be written, with room on the disk",
            found=error.strerror or error,
            todo="choose another place; whatever stood at this name is untouched",
        ) from error
    return len(data)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _as_tensor(payload: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(payload, np.uint8).copy())


def _difference(mask: PackedMask, other: PackedMask) -> dict[str, Bits]:
    if mask.sizes != other.sizes or mask.fingerprint != other.fingerprint:
        raise RelativeMaskError(
            "a mask can only be stored relative to one over the same weights of the same base",
            expected=f"{len(mask.sizes)} tensors, {sum(mask.sizes.values())} bits",
            found=f"{len(other.sizes)} tensors, {sum(other.sizes.values())} bits",
            todo="save it without relative_to",
        )
    return {name: ~(bits ^ other.bits[name]) & _valid(mask.sizes[name]) for name, bits in mask.bits.items()}


def _valid(n: int) -> Bits:
    """Ones for n bits, zeros for the padding; equal bits are coded as 1, so few changes look like few weights off."""
    return np.packbits(np.ones(n, bool))


# ---- reading ----------------------------------------------------------------------------------------------------


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
        shapes = _check_tensors(file, manifest, buffers)
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
        tensors = {key: file.get_tensor(key) for key in shapes}
        _check_content(file, tensors)
    reference = _reference(manifest, references)
    empty = torch.empty(0, dtype=torch.uint8)
    coded = {name: (entry.codec, _bytes(tensors[f"mask.{name}"])) for name, entry in manifest.masks.items()}
    bits = codecs.decode((coded, _bytes(tensors.get(_SHARED, empty))), mask.sizes, weights)
    if reference is not None:
        bits = {name: ~(same ^ reference.bits[name]) & _valid(mask.sizes[name]) for name, same in bits.items()}
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
        shapes = _check_tensors(file, manifest, None)
        _check_content(file, {key: file.get_tensor(key) for key in shapes})
        parts = {"file": path.stat().st_size, "masks": 0, "norm": 0, "head": 0}
        for key in shapes:
            part = key.partition(".")[0]
            parts["masks" if part in ("mask", _SHARED) else part] += _nbytes(file, key)
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


def _check_tensors(file: Any, manifest: Manifest, buffers: Mapping[str, Tensor] | None) -> dict[str, tuple[int, ...]]:
    """Every tensor of the file is one we expect, of the size we expect; returns their shapes."""
    keys = set(file.keys())
    shapes = {key: tuple(file.get_slice(key).get_shape()) for key in keys}
    wanted = {f"mask.{name}" for name in manifest.masks}
    if any(entry.codec == codecs.LZMA for entry in manifest.masks.values()):
        wanted.add(_SHARED)
    if buffers is not None and manifest.norm_fingerprint is None:
        wanted |= {f"norm.{name}" for name in buffers}
    optional = {key for key in keys if key.startswith("head.") or (buffers is None and key.startswith("norm."))}
    if missing := sorted(wanted - keys):
        raise CorruptMaskFileError(
            "tensors are missing", expected=missing[0], found=f"{len(missing)} missing", todo=_DAMAGED
        )
    if extra := sorted(keys - wanted - optional):
        raise CorruptMaskFileError("tensors that do not belong", found=extra[0][:200], todo=_DAMAGED)
    one_bit_each = sum(-(-entry.bits // 8) for entry in manifest.masks.values())
    for key in keys:
        kind, _, name = key.partition(".")
        if kind == "mask":
            _limit(file, key, "U8", -(-manifest.masks[name].bits // 8))
        elif kind == _SHARED:
            _limit(file, key, "U8", one_bit_each)
        elif kind == "norm" and buffers is not None:
            _limit(file, key, "F32", 4 * buffers[name].numel())
            if shapes[key] != tuple(buffers[name].shape):
                raise WrongBaseError(f"wrong shape of {name}", expected=tuple(buffers[name].shape), found=shapes[key])
    floats = sum(4 * math.prod(entry.shape) for entry in manifest.masks.values())
    if (head := sum(_nbytes(file, key) for key in keys if key.startswith("head."))) > floats:
        raise CorruptMaskFileError("the head is larger than the base", expected=f"at most {floats} bytes", found=head)
    return shapes


def _limit(file: Any, key: str, dtype: str, most: int) -> None:
    found = file.get_slice(key).get_dtype()
    if found != dtype or _nbytes(file, key) > most:
        raise CorruptMaskFileError(
            f"{key} is not what it should be",
            expected=f"{dtype}, at most {most} bytes",
            found=f"{found}, {_nbytes(file, key)} bytes",
            todo=_DAMAGED,
        )


_WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def _nbytes(file: Any, key: str) -> int:
    part = file.get_slice(key)
    if part.get_dtype() not in _WIDTH:
        raise CorruptMaskFileError(f"{key} has a type no mask file uses", found=part.get_dtype(), todo=_DAMAGED)
    return int(math.prod(part.get_shape())) * _WIDTH[part.get_dtype()]


def _check_content(file: Any, tensors: Mapping[str, Tensor]) -> None:
    metadata = file.metadata()
    found = _content_hash(metadata["manifest"], tensors)
    if found != metadata.get("sha256"):
        raise CorruptMaskFileError(
            "the content of the mask file was altered",
            expected=f"SHA-256 {str(metadata.get('sha256'))[:16]}",
            found=found[:16],
            todo=_DAMAGED,
        )


def _content_hash(manifest: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the manifest, and of each tensor in the order of names: name, type, shape, bytes."""
    total = hashlib.sha256(manifest.encode() + b"\0")
    for name in sorted(tensors):
        tensor = tensors[name]
        kind = str(tensor.dtype).removeprefix("torch.")
        total.update(json.dumps([name, kind, list(tensor.shape)]).encode() + b"\0")
        total.update(as_bytes(tensor))
    return total.hexdigest()


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
