"""Making packs of masks (`packs.py`)."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import torch

from ..errors import ConfigError, MaskFileError
from . import norm_codes
from .base import Base
from .container import container_bytes
from .extensions import CODES
from .history import BitHistory, CodeHistory, Codes
from .layout import MASKS, NAME, SHARED
from .manifest import VERSION, Manifest, hashed_words
from .mask import PackedMask, weights_with_bits
from .pack_words import BITS, BLOCK, FILE, FORMAT, HASHES, NORM, Entry, Words, kind_of, parse_words
from .packs import keys_of
from .reader import OpenedMask
from .writer import mask_file_bytes


class Packer:
    """Takes masks of one base, one after the other, and makes a pack of them."""

    def __init__(self, base: Base) -> None:
        self._parameters = {name: value.detach() for name, value in base.parameters.items()}
        self._buffers = base.buffers
        self._bits, self._codes = BitHistory(), CodeHistory()
        self._coded: list[bytes] = []
        self._steps: list[Codes] = []
        self._files: dict[str, bytes] = {}
        self._hashes: list[str] = []
        self._kinds: list[Manifest] = []
        self._entries: list[Entry] = []
        self._names: set[str] = set()
        self.file_bytes = 0
        """What the masks would take as files."""

    def add(self, name: str, mask: PackedMask) -> None:
        if not NAME.fullmatch(name) or name in self._names:
            raise ConfigError(
                "a mask in a pack cannot have this name",
                expected="letters, digits, dot, dash and underscore, at most 100, and no name twice",
                found=name[:120],
                todo="rename its file",
            )
        data = mask_file_bytes(mask, {each: self._parameters[each] for each in mask.sizes}, self._buffers)
        with OpenedMask(data) as opened:
            manifest, plain = opened.manifest, set(opened.table) <= {MASKS, SHARED, CODES}
        weights = weights_with_bits(self._parameters, mask.sizes, mask.chosen)
        keys = keys_of(mask.sizes, mask.chosen)
        bits = {keys[each]: packed for each, packed in mask.bits.items()}
        coded = self._bits.encode(bits, weights) if plain else data
        self._hashes.append(mask.sha256)
        self._names.add(name)
        self.file_bytes += len(data)
        if len(coded) >= len(data):  # it has a head, or a pattern that rice does not see
            self._files[f"{FILE}{len(self._entries)}"] = data
            self._entries.append(Entry(name))
            return
        self._bits.add(bits)
        kind, own = kind_of(manifest)
        if kind not in self._kinds:
            self._kinds.append(kind)
        self._coded.append(coded)
        if mask.norm:
            codes = norm_codes.exact_codes(mask.norm, self._buffers)
            self._steps.append(self._codes.steps(np.concatenate(list(codes.values()))))
        on = sum(mask.active.values())
        self._entries.append(Entry(name, self._kinds.index(kind), on, len(coded), own))

    def pack(self) -> bytes:
        """The bytes of the file; the same masks in the same order give the same."""
        parts = {BITS: b"".join(self._coded), **self._files}
        for number, start in enumerate(range(0, len(self._steps), BLOCK)):
            # Of each statistic, all masks side by side: what was far from the mean in one may be so in the next.
            parts[f"{NORM}{number}"] = norm_codes.stream(np.stack(self._steps[start : start + BLOCK], 1).ravel())
        tensors = {key: torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for key, data in parts.items()}
        hashes = np.frombuffer(bytes.fromhex("".join(self._hashes)), np.uint8).copy()
        tensors[HASHES] = torch.from_numpy(hashes).view(-1, 32)
        words = Words(f"selfmask {version('selfmask')}", tuple(self._kinds), tuple(self._entries))
        metadata = {"format": FORMAT, "version": VERSION, "about": words.to_text()}
        try:
            parse_words("the pack", metadata)
        except (MaskFileError, ValueError) as error:
            raise ConfigError(
                "these masks cannot be stored in one pack",
                found=getattr(error, "found", error),
                todo="make several packs of fewer masks",
            ) from error
        return container_bytes(tensors, metadata, hashed=hashed_words(FORMAT, VERSION, metadata["about"]))
