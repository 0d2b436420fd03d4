"""Packs: many masks of one base in one file, which tells once what they share. `docs/format.md` specifies it.

"bits" has the coded masks, one after the other, "norm.J" statistics (`history.py`), "hashes" the identity of each mask;
"file.K" is the mask file of one that has more than that (a head, say), or that is smaller so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ..errors import CorruptMaskFileError, MaskFileError
from . import norm_codes
from .base import Base, check_base, chosen_by, warn_of_base
from .container import Container, Source, open_container
from .history import BitHistory, CodeHistory, Key
from .manifest import VERSION, Manifest, hashed_words
from .mask import Bits, PackedMask, weights_with_bits
from .pack_words import BITS, BLOCK, FILE, FORMAT, HASHES, NORM, Entry, check_table, has_statistics, parse_words
from .reader import OpenedMask, as_told, read_mask_file


class OpenedPack:
    """A pack that was read, whole: its words and sizes are sound. What is wrong with a mask is found when it is
    decoded."""

    def __init__(self, source: Source | Container) -> None:
        with open_container(source) as file:
            self.name, self.size = file.name, file.size
            self.words = parse_words(file.name, file.metadata)
            check_table(file.table, self.words)
            self._tensors = file.read(hashed_words(FORMAT, VERSION, file.metadata["about"]))
        self._hashes: list[str] = [row.tobytes().hex() for row in self._tensors[HASHES].numpy()]
        self.manifests: list[Manifest] = [
            self._manifest(number, entry) for number, entry in enumerate(self.words.entries)
        ]
        """What each mask says of itself; of those that are coded here, without codecs."""

    def _manifest(self, number: int, entry: Entry) -> Manifest:
        if entry.kind is not None:
            return self.words.manifest(entry, self._hashes[number])
        manifest = OpenedMask(self.file(number)).checked().manifest
        if manifest.mask_sha256 != self._hashes[number]:
            raise CorruptMaskFileError(f"the mask {entry.name} in the pack is another", found=manifest.mask_sha256[:16])
        return manifest

    def file(self, number: int) -> bytes:
        """The file of a mask that is there as one."""
        return self._tensors[f"{FILE}{number}"].numpy().tobytes()

    def masks(self, base: Base) -> Iterator[tuple[str, PackedMask]]:
        """All masks, in order, for their base."""
        bits, rows, at, kinds = BitHistory(), self._rows(base.buffers), 0, dict[int, _Kind]()
        data = self._tensors[BITS].numpy().data
        for number, entry in enumerate(self.words.entries):
            manifest = self.manifests[number]
            if entry.kind is None:
                yield entry.name, read_mask_file(self.file(number), **base._asdict())
                continue
            if entry.kind not in kinds:
                kinds[entry.kind] = _Kind(manifest, base)
            kind = kinds[entry.kind]
            found = bits.decode(bytes(data[at : at + entry.bytes]), kind.keys.values(), kind.weights)
            at += entry.bytes
            mask = kind.mask(manifest, found, next(rows) if has_statistics(manifest) else {})
            if mask.sha256 != manifest.mask_sha256 or sum(mask.active.values()) != entry.active:
                raise CorruptMaskFileError(
                    f"the mask {entry.name} in the pack is damaged",
                    expected=f"{entry.active} bits on, {manifest.mask_sha256[:16]}",
                    found=f"{sum(mask.active.values())} bits on, {mask.sha256[:16]}",
                )
            yield entry.name, mask

    def _rows(self, buffers: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The statistics of the masks that have coded ones; a block at a time is in memory."""
        width, left, history = sum(map(_size, buffers.values())), self.words.with_statistics, CodeHistory()
        for number in range(-(-left // BLOCK)):
            count = min(BLOCK, left - number * BLOCK)
            stream = self._tensors[f"{NORM}{number}"].numpy().tobytes()
            for steps in norm_codes.unstream(stream, width * count).reshape(width, count).T:
                yield norm_codes.statistics_of(history.codes(steps), buffers, {})


class _Kind:
    """What the masks of a kind have in common on their base."""

    def __init__(self, manifest: Manifest, base: Base) -> None:
        parameters, buffers, state, fingerprints, choose = base
        check_base(manifest, parameters, buffers, state, fingerprints)
        warn_of_base(manifest, state, fingerprints)
        self.sizes = {name: manifest.masks[name].bits for name in parameters if name in manifest.masks}
        self.chosen = chosen_by(manifest, choose)
        self.weights = weights_with_bits(parameters, self.sizes, self.chosen)
        self.keys = keys_of(self.sizes, self.chosen)
        for name, weight in self.weights.items():
            if weight.numel() != self.sizes[name]:
                raise CorruptMaskFileError(
                    f"the masks of {name} have the wrong number of bits",
                    expected=weight.numel(),
                    found=self.sizes[name],
                )
        if not manifest.norm_fingerprint and has_statistics(manifest) != bool(buffers):
            raise CorruptMaskFileError("the masks have no statistics, or such that their base has not")

    def mask(self, manifest: Manifest, bits: Mapping[Key, Bits], norm: dict[str, Tensor]) -> PackedMask:
        own = {name: bits[self.keys[name]] for name in self.sizes}
        return as_told(manifest, own, self.sizes, norm, self.chosen)


def keys_of(sizes: Mapping[str, int], chosen: Mapping[str, Bits]) -> dict[str, Key]:
    """What the history of each tensor goes by."""
    return {name: (name, size, chosen[name].tobytes() if name in chosen else b"") for name, size in sizes.items()}


def is_pack(source: Source | Container) -> bool:
    """Whether a file says that it is a pack; not whether it is sound. A container stays open."""
    try:
        if isinstance(source, Container):
            return source.metadata.get("format") == FORMAT
        with open_container(source) as file:
            return is_pack(file)
    except MaskFileError:
        return False


def _size(tensor: Tensor) -> int:
    return tensor.numel()
