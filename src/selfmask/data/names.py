"""Many names in little memory: one run of bytes, and where each of them ends."""

from __future__ import annotations

import hashlib
import heapq
import json
import operator
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

_CHUNK = 1 << 17  # names sorted at a time
_AT_ONCE = 1 << 12  # names turned into text at a time
_NO_NAME = b"/"  # which no part of a path contains
_BETWEEN = "\0"  # parts of a path: it sorts before all else, so that the files of a folder stay together


class Names(Sequence[str]):
    """Texts that are never changed. A list of them would take three times the memory, or more."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        data, ends = bytearray(), array("Q")
        for text in texts:
            data += text
            ends.append(len(data))
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self._text(number) for number in range(len(self))[i]]
        return self._text(range(len(self))[i])

    def __iter__(self) -> Iterator[str]:
        return map(self._text, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Names) and type(self) is type(other):
            return vars(self) == vars(other)
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # like a list

    def _text(self, i: int) -> str:
        return bytes(self._data[self._ends[i - 1] if i else 0 : self._ends[i]]).decode("utf-8", "surrogatepass")


class PathNames(Names):
    """Paths below a folder, as `SortedPaths` collects them: with `root` the files, without it names for people."""

    def __init__(self, paths: Iterable[bytes], root: str | None = None) -> None:
        super().__init__(paths)
        self._root = root

    def below(self, root: str) -> PathNames:
        """The same names, as files of a folder; the memory is shared."""
        files = PathNames([], os.path.join(root, ""))  # noqa: PTH118 - with a slash at the end
        files._data, files._ends = self._data, self._ends
        return files

    def top(self, i: int) -> str:
        """The first part of a path."""
        return super()._text(i).partition(_BETWEEN)[0]

    def _text(self, i: int) -> str:
        path = super()._text(i).replace(_BETWEEN, "/")
        return os.fsencode(path).decode("utf-8", "backslashreplace") if self._root is None else self._root + path


class SortedPaths:
    """Paths come in any order and leave sorted, part by part, without ever being a Python object each."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._last: list[bytes] = []
        self.tops: set[str] = set()
        self.flat = False
        """Whether one of them lies in no sub-folder."""

    def add(self, parts: tuple[str, ...]) -> None:
        self._last.append(_BETWEEN.join(parts).encode("utf-8", "surrogatepass"))  # which sorts as the text does
        if len(parts) == 1:
            self.flat = True
        elif parts[0] not in self.tops:
            self.tops.add(parts[0])
        if len(self._last) == _CHUNK:
            self._close()

    def _close(self) -> None:
        self._chunks.append(_NO_NAME.join(sorted(self._last)))
        self._last = []

    def names(self) -> PathNames:
        """All of them; what was collected is let go."""
        if self._last:
            self._close()
        chunks, self._chunks = self._chunks, []
        return PathNames(heapq.merge(*map(_each, chunks)))


def _each(chunk: bytes) -> Iterator[bytes]:
    start = 0
    while (end := chunk.find(_NO_NAME, start)) >= 0:
        yield chunk[start:end]
        start = end + 1
    yield chunk[start:]


def names_hash(names: Sequence[str]) -> str:
    total = hashlib.sha256()
    update_with_names(total, names)
    return total.hexdigest()


def update_with_names(total: Any, names: Sequence[str]) -> None:
    """Add the JSON of a list of names to a hash, without having it in memory."""
    total.update(b"[")
    for start in range(0, len(names), _AT_ONCE):
        text = json.dumps(list(names[start : start + _AT_ONCE]))[1:-1]
        total.update(f"{', ' if start else ''}{text}".encode())
    total.update(b"]")
