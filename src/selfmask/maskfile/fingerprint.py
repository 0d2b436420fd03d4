"""A hash of the base's weights: a mask means nothing on any other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


class Fingerprints:
    """Fingerprints of sets of base tensors. Each tensor is hashed once and again only if it was written to."""

    def __init__(self) -> None:
        self._digests: dict[str, tuple[int | None, str]] = {}  # name -> (version or None for ever, digest)

    def of(self, tensors: Mapping[str, Tensor]) -> str:
        """One hash over names, types, shapes and bytes."""
        stale = [name for name, tensor in tensors.items() if not self._is_known(name, tensor)]
        if stale:
            # hashlib lets go of the interpreter lock, so threads use all cores.
            with ThreadPoolExecutor() as pool:
                digests = pool.map(lambda name: tensor_digest(name, tensors[name]), stale)
                for name, digest in zip(stale, digests, strict=True):
                    self._digests[name] = tensors[name]._version, digest
        total = hashlib.sha256()
        for name in sorted(tensors):
            total.update(bytes.fromhex(self._digests[name][1]))
        return total.hexdigest()

    def remember(self, tensors: Mapping[str, Tensor], convert: Callable[[Tensor], Tensor]) -> None:
        """Before a conversion to another type, hash what the masks were made for, and keep to that."""
        for name, tensor in tensors.items():
            if not tensor.is_meta and convert(tensor.new_zeros(1)).dtype != tensor.dtype:
                self.of({name: tensor})
                self._digests[name] = None, self._digests[name][1]

    def _is_known(self, name: str, tensor: Tensor) -> bool:
        return name in self._digests and self._digests[name][0] in (None, tensor._version)


def tensor_digest(name: str, tensor: Tensor) -> str:
    """SHA-256 of a tensor: its name, type and shape as a JSON list, a zero byte, its bytes in row-major order."""
    kind = str(tensor.dtype).removeprefix("torch.")
    digest = hashlib.sha256(json.dumps([name, kind, list(tensor.shape)]).encode() + b"\0")
    digest.update(as_bytes(tensor))
    return digest.hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; of any type, and without a copy where it is laid out so."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
