"""A hash of the base: a mask means nothing on any other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn


class State(NamedTuple):
    """All tensors of a network, by each of the names that they have in it."""

    stored: dict[str, Tensor]
    """What a checkpoint of it holds: parameters and persistent buffers, but not the counters of batches, which change
    no output. Whether all of them are run cannot be known: a head that is never called counts too."""
    tables: dict[str, Tensor]
    """Buffers that are not persistent: made by its code, again for another image size, and some only when needed."""


def state_of(model: nn.Module) -> State:
    """What decides the output of a network, as far as it is tensors."""
    state = State(dict(model.named_parameters(remove_duplicate=False)), {})
    for name, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and key != "num_batches_tracked":
                kind = state.tables if key in module._non_persistent_buffers_set else state.stored
                kind[f"{name}.{key}" if name else key] = buffer
    return state


class Fingerprints:
    """Fingerprints of sets of base tensors. Each tensor is hashed once, and again only if it was written to.

    What `tensor.data` is used to write stays unseen, as it does to autograd.
    """

    def __init__(self) -> None:
        self._digests: dict[str, tuple[object, str]] = {}  # name -> (which tensor in which state, digest)

    def of(self, tensors: Mapping[str, Tensor]) -> str:
        """One hash over names, types, shapes and bytes."""
        known = self.known(tensors)
        if stale := [name for name in tensors if name not in known]:
            stale.sort(key=lambda name: -tensors[name].nbytes)  # the largest first: no thread is left with it alone
            # hashlib lets go of the interpreter lock, so threads use all cores.
            with ThreadPoolExecutor() as pool:
                digests = pool.map(lambda name: tensor_digest(name, tensors[name]), stale)
                fresh = dict(zip(stale, digests, strict=True))
            self.adopt(tensors, fresh)
            known |= fresh
        total = hashlib.sha256()
        for name in sorted(tensors):
            total.update(bytes.fromhex(known[name]))
        return total.hexdigest()

    def known(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """The digests of those tensors that are as they were when hashed."""
        found = {name: (tensor, self._digests.get(name)) for name, tensor in tensors.items()}
        return {name: kept[1] for name, (tensor, kept) in found.items() if kept and kept[0] == _state(tensor)}

    def adopt(self, tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        """Take digests as those of tensors: of copies, or of what was converted after hashing."""
        # In one step: other threads may be asking.
        self._digests.update({name: (_state(tensors[name]), digest) for name, digest in digests.items()})


def _state(tensor: Tensor) -> object:
    # Tensors of inference mode count no changes: they are never taken for what they were.
    return object() if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


def tensor_digest(name: str, tensor: Tensor) -> str:
    """SHA-256 of a tensor: its name, type and shape as a JSON list, a zero byte, its bytes in row-major order."""
    kind = str(tensor.dtype).removeprefix("torch.")
    digest = hashlib.sha256(json.dumps([name, kind, list(tensor.shape)]).encode() + b"\0")
    digest.update(as_bytes(tensor))
    return digest.hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; of any type, and without a copy where it is laid out so."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
