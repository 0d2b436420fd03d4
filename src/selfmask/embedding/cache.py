"""Features kept on disk by content: by all that they depend on, so that what is found is never stale."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from ..errors import FeaturesWriteError, MaskFileError
from ..files import remove_temporaries, write_atomically
from ..maskfile import open_container
from ..maskfile.container import container_bytes

LIMIT = 10 << 30  # bytes in the folder; beyond, what was not used for the longest time goes
_FORMAT = 2  # of the entries, and of what they are found by
_ENDING = ".safetensors"
_A_DAY = 86_400.0  # seconds; no entry takes that long to write


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Features of images, a row for each that could be read; `kept` are the numbers of these."""

    rows: Tensor
    kept: list[int]


def cache_folder() -> Path:
    """The environment variable SELFMASK_CACHE, or a folder in the user's cache."""
    return Path(os.environ.get("SELFMASK_CACHE") or "~/.cache/selfmask/features").expanduser()


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
        with contextlib.suppress(OSError):  # a folder that can only be read is of use, too
            os.utime(path)  # used just now
        return Vectors(tensors["rows"], tensors["kept"].tolist())

    def put(self, key: str, vectors: Vectors) -> None:
        data = container_bytes({"rows": vectors.rows, "kept": torch.tensor(vectors.kept)}, {}, hashed="")
        if len(data) > self.limit:
            return
        try:
            write_atomically(self._path(key), data, FeaturesWriteError)
            self._drop_oldest()
        except (FeaturesWriteError, OSError) as error:
            reason = error.found if isinstance(error, FeaturesWriteError) else error.strerror
            if self._say is not None:  # once is enough
                self._say(f"features are not kept for the next time: cannot write to {self.folder} ({reason})")
            self._say = None

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_ENDING}"

    def _drop_oldest(self) -> None:
        remove_temporaries(self.folder, age=_A_DAY)
        entries = []
        for path in self.folder.glob(f"*{_ENDING}"):
            with contextlib.suppress(FileNotFoundError):  # another process drops, too
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= size


def key_of(model: str, images: str) -> str:
    """What features are found by: which model, which images, and the code that made the one into the other."""
    parts = [_FORMAT, version("selfmask"), torch.__version__, model, images]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
