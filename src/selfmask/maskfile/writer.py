"""Making mask files of masks, and writing them, atomically."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, MaskFileError, MaskWriteError, RelativeMaskError
from ..files import write_atomically
from . import codecs, norm_codes
from .container import MAX_HEADER, MAX_TENSORS, PathLike, container_bytes
from .extensions import CODES, NORM_CODES, Extension, is_known, owner, shared
from .layout import MASKS, SHARED, is_statistic, max_head, same_bits
from .manifest import FORMAT, MAX_MASKS, VERSION, Manifest, TensorEntry, hashed_words, parse_manifest
from .mask import Bits, PackedMask, weights_with_bits
from .reader import MaskSource, OpenedMask


def write_mask_file(
    path: PathLike,
    mask: PackedMask,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor] | None = None,
    *,
    relative_to: PackedMask | None = None,
) -> int:
    """Write a mask atomically; return the file's size. As for the rest, see `mask_file_bytes`."""
    data = mask_file_bytes(mask, parameters, buffers, relative_to=relative_to)
    return write_atomically(Path(path), data, MaskWriteError)


def mask_file_bytes(
    mask: PackedMask,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor] | None = None,
    *,
    relative_to: PackedMask | None = None,
) -> bytes:
    """The bytes of a mask's file; the same mask gives the same.

    `parameters` and `buffers`, the batch-norm statistics, are those of the base. Without them (they were converted) the
    file is larger, and as good.
    """
    bits = mask.bits if relative_to is None else _difference(mask, relative_to)
    weights = weights_with_bits(parameters, mask.sizes, mask.chosen) if parameters else {}
    coded, shared = codecs.encode(bits, mask.sizes, weights)
    tensors = {MASKS: _as_tensor(b"".join(coded[name][1] for name in sorted(coded)))}
    if shared:
        tensors[SHARED] = _as_tensor(shared)
    # Where nobody checks the base's statistics (a mask from a file of version 1), nothing can be told by them.
    codes, few = norm_codes.encode(mask.norm, buffers) if buffers and mask.base_fingerprint else (b"", set[str]())
    if few:
        tensors[CODES] = _as_tensor(codes)
    tensors |= {f"norm.{name}": _at_least_float32(value) for name, value in mask.norm.items() if name not in few}
    tensors |= {f"head.{name}": value.detach().cpu().contiguous().clone() for name, value in mask.head.items()}
    words = Manifest(
        creator=f"selfmask {version('selfmask')}",
        base_name=mask.base_name,
        fingerprint=mask.fingerprint,
        preprocessing=mask.preprocessing,
        config=mask.config,
        masks={
            name: TensorEntry(mask.shapes[name], mask.sizes[name], mask.active[name], codec, len(payload))
            for name, (codec, payload) in coded.items()
        },
        mask_sha256=mask.sha256,
        relative_to=None if relative_to is None else relative_to.sha256,
        norm_fingerprint=mask.norm_fingerprint,
        progress=mask.progress,
        notes=mask.notes,
        base_fingerprint=mask.base_fingerprint,
        base_tensors=mask.base_tensors,
        tables_fingerprint=mask.tables_fingerprint,
        extensions=mask.extensions | ({NORM_CODES: Extension(1, True)} if few else {}),
    )
    data = _contained(tensors, words)
    _check_limits(data, len(tensors), mask)
    return data


def shared_bytes(
    source: MaskSource, *, licence: str | None = None, data: str | None = None, trained_with: Any = None
) -> bytes:
    """The bytes of a mask file that says these words; its mask, statistics and head are as they were."""
    with nullcontext(source) if isinstance(source, OpenedMask) else OpenedMask(source) as opened:
        manifest = opened.checked().manifest
        if manifest.version != VERSION:
            raise ConfigError(
                "files of this version have no room for a licence and the like",
                expected=f"version {VERSION}",
                found=manifest.version,
                todo="load the mask on its base and save it again",
            )
        # As the format asks: who writes a file anew drops what they do not know.
        known = {name: each for name, each in manifest.extensions.items() if is_known(name, each)}
        tensors = {key: each for key, each in opened.tensors.items() if owner(key) in {None, *known}}
    words = shared(known, licence=licence, data=data, trained_with=trained_with)
    return _contained(tensors, dataclasses.replace(manifest, extensions=words))


def _contained(tensors: Mapping[str, Tensor], words: Manifest) -> bytes:
    """A file of these tensors and words, if its words are such as a reader takes."""
    try:
        metadata = {"format": FORMAT, "version": VERSION, "manifest": words.to_text()}
        parse_manifest(metadata)
    except (MaskFileError, ValueError) as error:
        raise ConfigError(
            "the mask cannot be stored",
            found=getattr(error, "found", error),
            todo="change its settings, preprocessing or notes",
        ) from error
    return container_bytes(tensors, metadata, hashed=hashed_words(FORMAT, VERSION, metadata["manifest"]))


def _check_limits(data: bytes, tensors: int, mask: PackedMask) -> None:
    """Refuse to write what no reader would read."""
    if tensors > MAX_TENSORS or len(mask.bits) > MAX_MASKS:
        raise ConfigError(
            "too many tensors are masked", expected=f"at most {MAX_MASKS}", found=len(mask.bits), todo="mask fewer"
        )
    if odd := [name for name, value in mask.norm.items() if not is_statistic(name, value)]:
        raise ConfigError(
            "the batch-norm statistics of the mask are not finite, or negative",
            found=odd[0],
            todo="train with a lower learning rate, or recalibrate on images",
        )
    header, head = int.from_bytes(data[:8], "little"), sum(value.nbytes for value in mask.head.values())
    if header > MAX_HEADER:
        raise ConfigError(
            "the metadata of the mask file is too long", expected=f"at most {MAX_HEADER} bytes", found=header
        )
    if head > (most := max_head(mask.shapes)):
        raise ConfigError("the head is larger than the masked weights", expected=f"at most {most} bytes", found=head)


def _at_least_float32(value: Tensor) -> Tensor:
    return value.detach().cpu().to(torch.promote_types(value.dtype, torch.float32)).contiguous()


def _as_tensor(payload: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(payload, np.uint8).copy())


def _difference(mask: PackedMask, other: PackedMask) -> dict[str, Bits]:
    if mask.sizes != other.sizes or mask.fingerprint != other.fingerprint:
        raise RelativeMaskError(
            "a mask can only be stored relative to a mask of the same weights of the same base",
            expected=f"{len(mask.sizes)} tensors, {sum(mask.sizes.values())} bits",
            found=f"{len(other.sizes)} tensors, {sum(other.sizes.values())} bits",
            todo="save it without relative_to",
        )
    return {name: same_bits(bits, other.bits[name], mask.sizes[name]) for name, bits in mask.bits.items()}
