"""Features kept on disk by content: by all that they depend on, so that what is found is never stale."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from ..data.caches import cache_folder, drop_oldest, used_now
from ..errors import FeaturesWriteError, MaskFileError
from ..files import write_atomically
from ..maskfile import open_container
from ..maskfile.container import container_bytes

__all__ = ["FeatureCache", "Vectors", "cache_folder", "key_of"]

LIMIT = 10 << 30  # bytes in the folder; beyond, what was not used for the longest time goes
_FORMAT = 2  # of the entries, and of what they are found by
_ENDING = ".safetensors"


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Features of images, a row for each that could be read; `kept` are the numbers of these."""

    rows: Tensor
    kept: list[int]


class FeatureCache:
    """A folder of features. Whatever is wrong with it, it is only slower: `say` is told, nothing is raised."""

    def __init__(self, folder: Path, say: Callable[[str], None], limit: int = LIMIT) -> None:
        self.folder, self.limit = folder, limit
        self._say: Callable[[str], None] | None = say

    def get(self, key: str) -> Vectors | None:
        """The features of that key; None where there are none, or not whole."""
        path = self._path(key)
        try:
            with open_container(path) as file:
                rows, kept = (file.table.get(name) for name in ("rows", "kept"))
                if rows is None or kept is None or (rows.dtype, kept.dtype) != ("F32", "I64"):
                    return None
                if len(rows.shape) != 2 or kept.shape != rows.shape[:1]:
                    return None
                tensors = file.read(hashed="")
        except MaskFileError:
            return None
        used_now(path)
        return Vectors(tensors["rows"], tensors["kept"].tolist())

    def put(self, key: str, vectors: Vectors) -> None:
        data = container_bytes({"rows": vectors.rows, "kept": torch.tensor(vectors.kept)}, {}, hashed="")
        if len(data) > self.limit:
            return
        try:
            write_atomically(self._path(key), data, FeaturesWriteError)
            drop_oldest(self.folder, _ENDING, self.limit)
        except (FeaturesWriteError, OSError) as error:
            reason = error.found if isinstance(error, FeaturesWriteError) else error.strerror
            if self._say is not None:  # once is enough
                self._say(f"features are not kept for the next time: cannot write to {self.folder} ({reason})")
            self._say = None

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_ENDING}"


def key_of(model: str, images: str) -> str:
    """What features are found by: which model, which images, and the code that made the one into the other."""
    parts = [_FORMAT, version("selfmask"), torch.__version__, model, images]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
