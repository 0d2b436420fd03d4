"""A hash of the base's weights: a mask means nothing on any other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


class Fingerprints:
    """Fingerprints of sets of base tensors. Each tensor is hashed once, and again only if it was written to.

    What `tensor.data` is used to write stays unseen, as it does to autograd.
    """

    def __init__(self) -> None:
        self._digests: dict[str, tuple[object, str]] = {}  # name -> (which tensor in which state, digest)

    def of(self, tensors: Mapping[str, Tensor]) -> str:
        """One hash over names, types, shapes and bytes."""
        known = self.known(tensors)
        stale = [name for name in tensors if name not in known]
        if stale:
            # hashlib lets go of the interpreter lock, so threads use all cores.
            with ThreadPoolExecutor() as pool:
                digests = pool.map(lambda name: tensor_digest(name, tensors[name]), stale)
                self.adopt(tensors, dict(zip(stale, digests, strict=True)))
        total = hashlib.sha256()
        for name in sorted(tensors):
            total.update(bytes.fromhex(self._digests[name][1]))
        return total.hexdigest()

    def known(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """The digests of those tensors that are as they were when hashed."""
        return {
            name: self._digests[name][1]
            for name, tensor in tensors.items()
            if name in self._digests and self._digests[name][0] == _state(tensor)
        }

    def adopt(self, tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        """Take digests as those of tensors: of copies, or of what was converted after hashing."""
        self._digests |= {name: (_state(tensors[name]), digest) for name, digest in digests.items()}


def _state(tensor: Tensor) -> object:
    return tensor.data_ptr(), tensor._version


def tensor_digest(name: str, tensor: Tensor) -> str:
    """SHA-256 of a tensor: its name, type and shape as a JSON list, a zero byte, its bytes in row-major order."""
    kind = str(tensor.dtype).removeprefix("torch.")
    digest = hashlib.sha256(json.dumps([name, kind, list(tensor.shape)]).encode() + b"\0")
    digest.update(as_bytes(tensor))
    return digest.hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; of any type, and without a copy where it is laid out so."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
