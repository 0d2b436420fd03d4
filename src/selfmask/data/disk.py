"""Decoded images on the disk, where they do not fit in memory: one file for a set of images, which all runs share.

Found by the content of the images and the size they were reduced to, so that what is found is never stale. The pixels
come first, one image after the other; then where each begins and how large it is, as JSON and arrays; then the length
of that.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import checked
from ..errors import RunError
from ..files import replacing
from ..locks import Lock
from .caches import cache_folder, drop_oldest, used_now

_LIMIT = 64 << 30  # bytes of all sets
_ROOM = 0.5  # share of the free disk that a new set may take
_ENDING = ".images"
_FORMAT = 1
_LENGTH = 8  # bytes
_MOST_BAD = 1 << 28  # bytes that name the bad ones

Bad = Mapping[int, tuple[str, str]]
"""Name and reason of each image that cannot be read, by its number."""


class DiskCache:
    """The file of one set of images.

    content: the identity of the images.
    """

    def __init__(self, content: str, side: int) -> None:
        key = hashlib.sha256(json.dumps([_FORMAT, content, side, torch.__version__]).encode()).hexdigest()
        self._path = cache_folder() / "images" / f"{key}{_ENDING}"

    def fits(self, size: int) -> bool:
        """Whether there is room for so many bytes."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return size <= min(_LIMIT, shutil.disk_usage(self._path.parent).free * _ROOM)
        return False

    def read(self, count: int) -> KeptOnDisk | None:
        """What an earlier run left of so many images; None if there is nothing, or it is not whole."""
        with contextlib.suppress(Exception):  # zip and numpy raise many kinds on damaged files
            kept = KeptOnDisk(self._path)
            if len(kept.starts) == count + 1:
                used_now(self._path)
                return kept
        return None

    @contextlib.contextmanager
    def writing(self) -> Iterator[Writer | None]:
        """Within, images can be added; the file appears at the end. None if another process does that just now, or
        the disk does not allow it."""
        try:
            lock = Lock(self._path.with_suffix(".lock"), self._path)
        except RunError:
            yield None
            return
        try:
            with contextlib.suppress(_NotKeptError), replacing(self._path) as file:
                writer = Writer(file)
                yield writer
                writer.finish()
            drop_oldest(self._path.parent, _ENDING, _LIMIT)
        finally:
            lock.close(remove=True)


class _NotKeptError(Exception):
    """The images were not all added."""


class Writer:
    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._starts, self._sizes = file, [0], list[tuple[int, int]]()
        self._bad: Bad | None = None

    def add(self, image: Tensor | None) -> None:
        """The next image, or nothing in the place of a bad one."""
        if image is not None:
            self._file.write(image.contiguous().numpy().data)
        self._starts.append(self._starts[-1] + (0 if image is None else image.numel()))
        self._sizes.append((0, 0) if image is None else (image.shape[1], image.shape[2]))

    def close(self, bad: Bad) -> None:
        """All were added."""
        self._bad = bad

    def finish(self) -> None:
        if self._bad is None:
            raise _NotKeptError
        end = io.BytesIO()
        named = np.frombuffer(
            json.dumps({str(number): entry for number, entry in self._bad.items()}).encode(), np.uint8
        )
        np.savez(end, starts=np.array(self._starts, np.int64), sizes=np.array(self._sizes, np.int32), bad=named)
        self._file.write(end.getbuffer())
        self._file.write(len(end.getbuffer()).to_bytes(_LENGTH, "little"))


class KeptOnDisk:
    """The images of such a file: read when they are asked for. It can be pickled."""

    tensor = None  # not in memory

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(size - _LENGTH)
            length = int.from_bytes(file.read(_LENGTH), "little")
            end = size - _LENGTH - length
            file.seek(end)
            with np.load(io.BytesIO(file.read(length)), allow_pickle=False) as arrays:
                self.starts, self.sizes, bad = arrays["starts"], arrays["sizes"], arrays["bad"].tobytes()
        self.bad = {int(number): _entry(entry) for number, entry in _named(bad).items()}
        if self.starts[-1] != end or (np.diff(self.starts) != 3 * self.sizes.astype(np.int64).prod(1)).any():
            raise ValueError("not whole")
        self._pixels: NDArray[np.uint8] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pixels": None}  # numpy would send all of it

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> Tensor:
        if self._pixels is None:
            self._pixels = np.memmap(self._path, np.uint8, "r")
        height, width = self.sizes[i].tolist()
        pixels = np.array(self._pixels[self.starts[i] : self.starts[i + 1]])  # a copy: the file must not be written to
        return torch.from_numpy(pixels).view(3, height, width)


def _named(bad: bytes) -> dict[str, Any]:
    return checked.mapping(checked.document(bad, most=_MOST_BAD), most=_MOST_BAD)


def _entry(value: object) -> tuple[str, str]:
    name, reason = checked.items(value, checked.text, most=2)
    return name, reason
