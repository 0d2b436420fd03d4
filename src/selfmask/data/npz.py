"""Arrays of .npz files that others made: how much memory one takes is known, and refused, before it is unpacked."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from ..memory import memory_left

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # numpy writes no others, and they make gigabytes of any byte
_OBJECT = 100  # bytes of a Python object, besides its text


class TooLargeError(ValueError):
    """An array that is larger than the memory that is left."""


class Npz:
    """An open .npz file. What it says of an array's size must be true, and fit into the memory that is left.

    Errors are ValueErrors, and whatever zipfile, zlib and numpy raise on damaged files.
    """

    def __init__(self, archive: zipfile.ZipFile, room: int) -> None:
        self._archive, self._room = archive, room
        self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def shape(self, name: str) -> tuple[int, ...]:
        """That of one array, by its header, which is all that is unpacked for it."""
        return self._header(self._members[name])[0]

    def read(self, name: str, *, as_list: bool = False) -> NDArray[Any]:
        """One array, of plain values. `as_list`: the caller will make Python objects of all of them."""
        member = self._members[name]
        needed = self._size(member, as_list)
        if needed > self._room:
            raise TooLargeError(f"{name} takes {needed:,} bytes, and {self._room:,} are left")
        self._room -= needed
        with self._archive.open(member) as file:
            array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        return array

    def _size(self, member: zipfile.ZipInfo, as_list: bool) -> int:
        """What the array will take, by its header."""
        shape, dtype = self._header(member)
        return math.prod(shape) * (2 * dtype.itemsize + _OBJECT if as_list else dtype.itemsize)

    def _header(self, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and type of the array, if they fit what there is of it."""
        if member.compress_type not in _METHODS:
            raise ValueError("compressed in a way that numpy does not write")
        with self._archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version not in _HEADERS:
                raise ValueError(f"an array of version {version}")
            shape, _, dtype = _HEADERS[version](file)
            start = file.tell()
        if dtype.hasobject:
            raise ValueError("pickled objects")
        count = math.prod(shape)
        if min(shape, default=0) < 0 or (count and not dtype.itemsize):
            raise ValueError(f"an array of shape {shape} and type {dtype}")
        if start + count * dtype.itemsize != member.file_size:
            raise ValueError(f"{member.file_size - start:,} bytes for an array of shape {shape} and type {dtype}")
        return shape, dtype


@contextmanager
def open_npz(path: Path) -> Iterator[Npz]:
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        yield Npz(archive, memory_left(psutil.virtual_memory().available))
