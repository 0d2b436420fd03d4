"""The folder of masks that is served: which names there are, in which files, and whether a file is still the same."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import BadRequestError, MaskWriteError, TakenNameError, UnknownModelError
from ..files import RunFile, remove_temporaries, sync_folder, write_atomically

ENDING = ".smn"
FROZEN = "frozen"
"""The name that the backbone itself goes by."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_IN_RUNS = (RunFile.CASCADE, RunFile.MASK)
_A_DAY = 86_400.0  # seconds; no upload takes that long


class Stamp(NamedTuple):
    """What tells a file from one that took its place, or that was written over."""

    device: int
    number: int
    size: int
    changed: int


class Found(NamedTuple):
    """The file of a name, as it was when somebody looked."""

    path: Path
    stamp: Stamp
    is_run: bool
    map: Stamp | None = None
    """Of the map that a run left beside it."""


class Shelf:
    """A folder of `NAME.smn` files and run folders `NAME/`. It is looked at anew every time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writing = threading.Lock()
        remove_temporaries(folder, age=_A_DAY)

    def find(self, name: str) -> Found | None:
        """The file of a name, if there is one; a name that cannot be one has none."""
        if not _NAME.fullmatch(name):
            return None
        for path, is_run in self._places(name):
            if (stamp := _stamp(path)) is not None:
                return Found(path, stamp, is_run, _stamp(path.parent / RunFile.MAP) if is_run else None)
        return None

    def names(self) -> list[str]:
        """All that have a file, in order."""
        names = set()
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.folder) as entries:
            for entry in entries:
                name = entry.name.removesuffix(ENDING)
                if name != FROZEN and self.find(name) is not None:
                    names.add(name)
        return sorted(names)

    def write(self, name: str, data: bytes, *, replace: bool) -> Path:
        """Put a file under a name, atomically."""
        path = next(self._places(checked_name(name)))[0]
        with self._writing:  # of two that add the same name, one is told that it is taken
            found = self.find(name)
            if found is not None and (found.is_run or not replace):
                raise TakenNameError(
                    f"there is a mask {name!r} already",
                    found="a run folder, which requests do not change" if found.is_run else None,
                    todo="choose another name" if found.is_run else "choose another name, or say replace=true",
                )
            write_atomically(path, data, MaskWriteError)
        return path

    def remove(self, name: str) -> None:
        found = self.find(name)
        if found is None:
            raise unknown(name)
        if found.is_run:
            raise TakenNameError(f"{name!r} is a run folder, which requests do not change", todo="remove it by hand")
        with suppress(FileNotFoundError):
            found.path.unlink()
        sync_folder(found.path.parent)

    def _places(self, name: str) -> Iterator[tuple[Path, bool]]:
        yield self.folder / f"{name}{ENDING}", False
        for file in _IN_RUNS:
            yield self.folder / name / file, True


def checked_name(name: str) -> str:
    """A name that a mask may be given."""
    if not _NAME.fullmatch(name) or name == FROZEN or name.endswith(ENDING):
        raise BadRequestError(
            "this cannot be the name of a mask",
            expected=f"letters, digits, dot, dash and underscore, at most 100, not {FROZEN!r}",
            found=name[:120],
        )
    return name


def unknown(name: str) -> UnknownModelError:
    return UnknownModelError(
        f"there is no model {name[:120]!r}", todo=f"list them: GET /v1/models; {FROZEN!r} is the backbone itself"
    )


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, Stamp]]:
    """A descriptor of a file, and what that very file is like: its name may be another's by now."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        yield descriptor, _of(os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return _of(status) if stat.S_ISREG(status.st_mode) else None


def _of(status: os.stat_result) -> Stamp:
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
