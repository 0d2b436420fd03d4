"""Reading mask files. Nothing is trusted: every size is checked before memory is asked for.

A mask file is a safetensors file (`docs/format.md`): "mask.NAME" coded bits, "lzma" the stream that tensors of
that codec share, "norm.NAME" batch-norm statistics, "head.NAME" an optional head, and a manifest as metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, CorruptMaskFileError, RelativeMaskError, WrongBaseError
from . import codecs
from .container import Container, Source, Stored, open_container
from .fingerprint import Fingerprints
from .layout import SHARED, max_head, same_bits
from .manifest import Manifest, parse_manifest
from .mask import Bits, PackedMask, weights_with_bits


class OpenedMask:
    """A mask file that is open: its words are read; its tensors once they are asked for, and kept.

    So whoever has to know the base's name before there is a base opens, reads and hashes the file only once.
    """

    def __init__(self, source: Source | Container, name: str | None = None) -> None:
        self._container = open_container(source, name)
        self.table = self._container.table
        try:
            self.manifest = parse_manifest(self._container.metadata)
        except BaseException:
            self._container.close()
            raise

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the file, with the content that was written. Their sizes are to be checked before."""
        return self._container.read(self._container.metadata["manifest"])

    def checked(self) -> OpenedMask:
        """Itself, with all checked that can be without the base."""
        _check_tensors(self.table, self.manifest, None)
        self.tensors  # noqa: B018 (reads and hashes)
        return self

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of the file and of each part of it."""
        parts = {"file": self._container.size, "masks": 0, "norm": 0, "head": 0}
        for key, stored in self.table.items():
            kind = key.partition(".")[0]
            parts["masks" if kind in ("mask", SHARED) else kind] += stored.nbytes
        return parts | {"words": parts["file"] - parts["masks"] - parts["norm"] - parts["head"]}

    def __enter__(self) -> OpenedMask:
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()


MaskSource = Source | Container | OpenedMask


def read_mask_file(
    source: MaskSource,
    *,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    fingerprints: Fingerprints,
    choose: Callable[[Mapping[str, Any], Iterable[str]], dict[str, Bits]],
    references: Iterable[PackedMask] = (),
    members: codecs.Members | None = None,
) -> PackedMask:
    """Read a mask for a base with these parameters and batch-norm `buffers`.

    `choose` tells by config and names which weights carry a bit (packed flags; nothing where all do), and
    `references` are the masks at hand that a relative file may refer to. `members` make the next mask of the same base
    faster to decode.
    """
    with nullcontext(source) if isinstance(source, OpenedMask) else OpenedMask(source) as opened:
        manifest = opened.manifest
        _check_base(manifest, parameters, buffers, fingerprints)
        _check_tensors(opened.table, manifest, buffers)
        tensors = opened.tensors
    # In the order of the model, so that optimizers find the scores in the order they know.
    sizes = {name: manifest.masks[name].bits for name in parameters if name in manifest.masks}
    chosen = _chosen(manifest, choose)
    weights = weights_with_bits(parameters, sizes, chosen)
    for name, weight in weights.items():
        if weight.numel() != sizes[name]:
            raise CorruptMaskFileError(
                f"the mask of {name} has the wrong number of bits", expected=weight.numel(), found=sizes[name]
            )
    reference = _reference(manifest, sizes, references)
    coded = {name: (manifest.masks[name].codec, _bytes(tensors[f"mask.{name}"])) for name in sizes}
    shared = _bytes(tensors[SHARED]) if SHARED in tensors else b""
    whole = {name: parameters[name] for name in sizes if name not in chosen}
    bits = codecs.decode((coded, shared), sizes, weights, members, fingerprints.known(whole))
    if reference is not None:
        bits = {name: same_bits(same, reference.bits[name], sizes[name]) for name, same in bits.items()}
    mask = PackedMask(
        bits={name: bits[name] for name in sizes},
        sizes=sizes,
        shapes={name: entry.shape for name, entry in manifest.masks.items()},
        config=manifest.config,
        norm={
            name: tensors[f"norm.{name}"].to(buffer.device, buffer.dtype, copy=True)
            for name, buffer in buffers.items()
            if f"norm.{name}" in tensors
        },
        fingerprint=manifest.fingerprint,
        head={key.removeprefix("head."): value.clone() for key, value in tensors.items() if key.startswith("head.")},
        base_name=manifest.base_name,
        preprocessing=manifest.preprocessing,
        notes=manifest.notes,
        norm_fingerprint=manifest.norm_fingerprint,
        progress=manifest.progress,
        chosen=chosen,
    )
    _check_mask(mask, manifest)
    return mask


def inspect_mask_file(source: MaskSource) -> tuple[Manifest, dict[str, int]]:
    """The manifest of a file and the bytes of each part of it, checked as far as is possible without the base."""
    with nullcontext(source) if isinstance(source, OpenedMask) else OpenedMask(source) as opened:
        return opened.checked().manifest, opened.parts


def _check_base(
    manifest: Manifest, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], fingerprints: Fingerprints
) -> None:
    """Names and shapes first, then the bytes of the weights."""
    todo = f"load the mask on {manifest.base_name or 'the base it was learned on'}, with the same weights"
    if not manifest.masks:
        raise CorruptMaskFileError("the mask file contains no masks", expected="at least one tensor", found="none")
    for name, entry in manifest.masks.items():
        shape = tuple(parameters[name].shape) if name in parameters else "no such parameter"
        if shape != entry.shape:
            expected = f"{name} of shape {entry.shape}"
            raise WrongBaseError("the mask is for another base", expected=expected, found=shape, todo=todo)
    checks = [("weights", {name: parameters[name] for name in manifest.masks}, manifest.fingerprint)]
    if manifest.norm_fingerprint is not None:
        checks.append(("batch-norm statistics", dict(buffers), manifest.norm_fingerprint))
    for what, tensors, expected in checks:
        if (found := fingerprints.of(tensors)) != expected:
            raise WrongBaseError(
                f"the mask was learned on other {what}, with the same architecture",
                expected=f"fingerprint {expected[:16]}",
                found=found[:16],
                todo=todo,
            )


def _check_tensors(stored: Mapping[str, Stored], manifest: Manifest, buffers: Mapping[str, Tensor] | None) -> None:
    """Every tensor of the file is one we expect, of the size we expect; without a base, as far as we can know."""
    wanted = {f"mask.{name}" for name in manifest.masks}
    if any(entry.codec == codecs.LZMA for entry in manifest.masks.values()):
        wanted.add(SHARED)
    if buffers is not None and manifest.norm_fingerprint is None:
        wanted |= {f"norm.{name}" for name in buffers}
    optional = {key for key in stored if key.startswith("head.") or (buffers is None and key.startswith("norm."))}
    if missing := sorted(wanted - set(stored)):
        raise CorruptMaskFileError(
            "tensors are missing from the file", expected=missing[0], found=f"{len(missing)} missing"
        )
    if extra := sorted(set(stored) - wanted - optional):
        raise CorruptMaskFileError(
            "the file contains tensors that do not belong in it",
            expected=f"{len(wanted)} tensors",
            found=extra[0][:200],
        )

    most = {f"mask.{name}": -(-entry.bits // 8) for name, entry in manifest.masks.items()}
    most[SHARED] = sum(most.values())
    for key, limit in most.items():
        part = stored.get(key, Stored("U8", (0,)))
        if part.dtype != "U8" or len(part.shape) != 1 or part.nbytes > limit:
            raise CorruptMaskFileError(
                f"{key} has the wrong type or size", expected=f"U8, at most {limit} bytes", found=part
            )
    for name, buffer in (buffers or {}).items():
        fitting = Stored("F64" if buffer.dtype == torch.float64 else "F32", tuple(buffer.shape))
        if (part := stored.get(f"norm.{name}", fitting)) != fitting:
            raise WrongBaseError(
                f"the batch-norm statistics {name} do not match the base",
                expected=fitting,
                found=part,
                todo="load the mask on the base it was learned on",
            )
    head = sum(part.nbytes for key, part in stored.items() if key.startswith("head."))
    if head > (limit := max_head({name: entry.shape for name, entry in manifest.masks.items()})):
        raise CorruptMaskFileError("the head is too large", expected=f"at most {limit} bytes", found=head)


def _chosen(
    manifest: Manifest, choose: Callable[[Mapping[str, Any], Iterable[str]], dict[str, Bits]]
) -> dict[str, Bits]:
    try:
        return choose(manifest.config, manifest.masks)
    except ConfigError as error:
        raise CorruptMaskFileError("the settings in the mask file are not valid", found=error.what) from error


def _reference(manifest: Manifest, sizes: Mapping[str, int], references: Iterable[PackedMask]) -> PackedMask | None:
    if manifest.relative_to is None:
        return None
    known = []
    for reference in references:
        if reference.sha256 == manifest.relative_to and reference.sizes == sizes:
            return reference
        known.append(reference.sha256[:16])
    raise RelativeMaskError(
        "this file stores only the difference from another mask, which is not loaded",
        expected=f"a mask with SHA-256 {manifest.relative_to[:16]}",
        found=", ".join(known) or "none",
        todo="load that mask first, or pass its file: relative_to=...",
    )


def _check_mask(mask: PackedMask, manifest: Manifest) -> None:
    for name, entry in manifest.masks.items():
        if mask.active[name] != entry.active:
            raise CorruptMaskFileError(
                f"the mask of {name} has the wrong number of active weights",
                expected=entry.active,
                found=mask.active[name],
            )
    if mask.sha256 != manifest.mask_sha256:
        raise CorruptMaskFileError("the mask is damaged", expected=manifest.mask_sha256[:16], found=mask.sha256[:16])


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
