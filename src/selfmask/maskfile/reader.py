"""Reading mask files. Nothing is trusted: every size is checked before memory is asked for.

A mask file is a safetensors file (`docs/format.md`): "masks" coded bits ("mask.NAME" in earlier files), "lzma" the
stream that tensors of that codec share, "norm.NAME" batch-norm statistics that are not coded, "head.NAME" an optional
head, and a manifest as metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor

from ..errors import CorruptMaskFileError, RelativeMaskError, WrongBaseError
from . import codecs, norm_codes
from .base import Choose, check_base, chosen_by, warn_of_base
from .container import Container, Source, Stored, open_container
from .extensions import CODES, NORM_CODES, PREFIX, is_known, owner
from .fingerprint import Fingerprints, State
from .layout import MASKS, SHARED, is_statistic, max_head, same_bits
from .manifest import FORMAT, Manifest, hashed_words, parse_manifest
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
        words = hashed_words(FORMAT, self.manifest.version, self._container.metadata["manifest"])
        return self._container.read(words)

    @property
    def payloads(self) -> dict[str, bytes]:
        """The coded mask of each tensor."""
        masks = self.manifest.masks
        if not self.manifest.joined:
            return {name: _bytes(self.tensors[f"mask.{name}"]) for name in masks}
        data, at, found = _bytes(self.tensors[MASKS]), 0, dict[str, bytes]()
        for name in sorted(masks):
            found[name] = data[at : (at := at + (masks[name].bytes or 0))]
        return found

    def checked(self) -> OpenedMask:
        """Itself, with all checked that can be without the base."""
        _check_tensors(self.table, self.manifest, None)
        self.tensors  # noqa: B018 (reads and hashes)
        return self

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the masked tensors, as they must be in the base."""
        return {name: entry.shape for name, entry in self.manifest.masks.items()}

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of the file and of each part of it."""
        parts = {"masks": 0, "norm": 0, "head": 0, "extensions": 0}
        names = {"mask": "masks", SHARED: "masks", "ext": "extensions", CODES: "norm"}
        for key, stored in self.table.items():
            kind = key if key in names else key.partition(".")[0]
            parts[names.get(kind, kind)] += stored.nbytes
        return {"file": self._container.size, **parts, "words": self._container.size - sum(parts.values())}

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
    state: State,
    fingerprints: Fingerprints,
    choose: Choose,
    references: Iterable[PackedMask] = (),
    members: codecs.Members | None = None,
) -> PackedMask:
    """Read a mask for a base with these parameters, batch-norm `buffers` and, in all, this `state`.

    `choose` tells by config and names which weights carry a bit (packed flags; nothing where all do), and
    `references` are the masks at hand that a relative file may refer to. `members` make the next mask of the same base
    faster to decode.
    """
    with nullcontext(source) if isinstance(source, OpenedMask) else OpenedMask(source) as opened:
        manifest = opened.manifest
        check_base(manifest, parameters, buffers, state, fingerprints)
        _check_tensors(opened.table, manifest, buffers)
        tensors, payloads = opened.tensors, opened.payloads
    _check_statistics(tensors)
    # In the order of the model, so that optimizers find the scores in the order they know.
    sizes = {name: manifest.masks[name].bits for name in parameters if name in manifest.masks}
    chosen = chosen_by(manifest, choose)
    weights = weights_with_bits(parameters, sizes, chosen)
    for name, weight in weights.items():
        if weight.numel() != sizes[name]:
            raise CorruptMaskFileError(
                f"the mask of {name} has the wrong number of bits", expected=weight.numel(), found=sizes[name]
            )
    reference = _reference(manifest, sizes, references)
    coded = {name: (manifest.masks[name].codec, payloads[name]) for name in sizes}
    shared = _bytes(tensors[SHARED]) if SHARED in tensors else b""
    whole = {name: parameters[name] for name in sizes if name not in chosen}
    bits = codecs.decode((coded, shared), sizes, weights, members, fingerprints.known(whole))
    if reference is not None:
        bits = {name: same_bits(same, reference.bits[name], sizes[name]) for name, same in bits.items()}
    head = {key.removeprefix("head."): value.clone() for key, value in tensors.items() if key.startswith("head.")}
    mask = as_told(manifest, bits, sizes, _statistics(tensors, buffers), chosen, head)
    _check_mask(mask, manifest)
    warn_of_base(manifest, state, fingerprints)
    return mask


def as_told(
    manifest: Manifest,
    bits: Mapping[str, Bits],
    sizes: dict[str, int],
    norm: dict[str, Tensor],
    chosen: dict[str, Bits],
    head: dict[str, Tensor] | None = None,
) -> PackedMask:
    """The mask of these bits and statistics, and all that its manifest tells of it."""
    extensions = {name: each for name, each in manifest.extensions.items() if is_known(name, each)}
    extensions.pop(NORM_CODES, None)  # how the statistics were stored
    return PackedMask(
        bits={name: bits[name] for name in sizes},
        sizes=sizes,
        shapes={name: entry.shape for name, entry in manifest.masks.items()},
        config=manifest.config,
        norm=norm,
        fingerprint=manifest.fingerprint,
        head=head or {},
        base_name=manifest.base_name,
        preprocessing=manifest.preprocessing,
        notes=manifest.notes,
        norm_fingerprint=manifest.norm_fingerprint,
        progress=manifest.progress,
        base_fingerprint=manifest.base_fingerprint,
        base_tensors=manifest.base_tensors,
        tables_fingerprint=manifest.tables_fingerprint,
        extensions=extensions,
        chosen=chosen,
    )


def inspect_mask_file(source: MaskSource) -> tuple[Manifest, dict[str, int]]:
    """The manifest of a file and the bytes of each part of it, checked as far as is possible without the base."""
    with nullcontext(source) if isinstance(source, OpenedMask) else OpenedMask(source) as opened:
        return opened.checked().manifest, opened.parts


def _check_tensors(stored: Mapping[str, Stored], manifest: Manifest, buffers: Mapping[str, Tensor] | None) -> None:
    """Every tensor of the file is one we expect, of the size we expect; without a base, as far as we can know."""
    wanted = {MASKS} if manifest.joined else {f"mask.{name}" for name in manifest.masks}
    if any(entry.codec == codecs.LZMA for entry in manifest.masks.values()):
        wanted.add(SHARED)
    statistics = {f"norm.{name}" for name in buffers or {}} if manifest.norm_fingerprint is None else set()
    optional = {key for key in stored if key.startswith("head.") or (buffers is None and key.startswith("norm."))}
    optional |= {key for key in stored if owner(key) in manifest.extensions and owner(key) != NORM_CODES}
    if NORM_CODES in manifest.extensions:
        wanted.add(CODES)
        optional |= statistics
    else:
        wanted |= statistics
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
    if manifest.joined:
        most[MASKS] = sum(entry.bytes or 0 for entry in manifest.masks.values())
        if stored[MASKS].nbytes != most[MASKS]:
            raise CorruptMaskFileError(
                "the masks have the wrong length", expected=most[MASKS], found=stored[MASKS].nbytes
            )
    if CODES in stored and buffers is not None:
        most[CODES] = norm_codes.most_bytes(buffers, (name for name in buffers if f"norm.{name}" not in stored))
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
    limit = max_head({name: entry.shape for name, entry in manifest.masks.items()})
    for what, prefix in (("head", "head."), ("extensions", PREFIX)):
        size = sum(part.nbytes for key, part in stored.items() if key.startswith(prefix) and key != CODES)
        if size > limit:
            raise CorruptMaskFileError(f"the {what} of the file is too large", expected=f"at most {limit}", found=size)


def _check_statistics(tensors: Mapping[str, Tensor]) -> None:
    for key, value in tensors.items():
        if key.startswith("norm.") and not is_statistic(key, value):
            raise CorruptMaskFileError("the file contains batch-norm statistics that no images have", found=key[:200])


def _statistics(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that are stored as they are, and those that are coded."""
    stored = {
        name: tensors[f"norm.{name}"].to(buffer.device, buffer.dtype, copy=True)
        for name, buffer in buffers.items()
        if f"norm.{name}" in tensors
    }
    return norm_codes.decode(_bytes(tensors[CODES]), buffers, stored) if CODES in tensors else stored


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
