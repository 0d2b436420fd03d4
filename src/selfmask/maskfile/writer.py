"""Writing mask files, atomically."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from ..errors import MaskWriteError, RelativeMaskError
from . import codecs
from .layout import SHARED, PathLike, content_hash, same_bits
from .manifest import FORMAT, VERSION, Manifest, TensorEntry
from .mask import Bits, PackedMask


def write_mask_file(
    path: PathLike, mask: PackedMask, weights: Mapping[str, Tensor], *, relative_to: PackedMask | None = None
) -> int:
    """Write a mask atomically; return the file's size. `weights` are the flat base weights that carry bits."""
    bits = mask.bits if relative_to is None else _difference(mask, relative_to)
    coded, shared = codecs.encode(bits, mask.sizes, weights)
    tensors = {f"mask.{name}": _as_tensor(payload) for name, (_, payload) in coded.items()}
    if shared:
        tensors[SHARED] = _as_tensor(shared)
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
    metadata["sha256"] = content_hash(manifest, tensors)
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
    return {name: same_bits(bits, other.bits[name], mask.sizes[name]) for name, bits in mask.bits.items()}
