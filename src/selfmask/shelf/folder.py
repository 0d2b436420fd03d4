"""A folder of masks: mask files, and run folders that have one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..files import RunFile

ENDING = ".smn"
_IN_RUNS = (RunFile.CASCADE, RunFile.MASK)


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


class MaskFolder:
    """A folder of `NAME.smn` files and run folders `NAME/`. It is looked at anew every time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, name: str) -> Found | None:
        """The file of a name, if there is one; a name that cannot be one has none."""
        if not self.may_be(name):
            return None
        for path, is_run in self._places(name):
            if (stamp := _stamp(path)) is not None:
                return Found(path, stamp, is_run, _stamp(path.parent / RunFile.MAP) if is_run else None)
        return None

    def may_be(self, name: str) -> bool:
        """Whether this can be a name: of one file in this very folder, that is not hidden."""
        return not name.startswith(".") and Path(name).name == name and "\0" not in name

    def names(self) -> list[str]:
        """All that have a file, in order."""
        names = set()
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.folder) as entries:
            for entry in entries:
                name = entry.name.removesuffix(ENDING)
                if self.find(name) is not None:
                    names.add(name)
        return sorted(names)

    def _places(self, name: str) -> Iterator[tuple[Path, bool]]:
        yield self.folder / f"{name}{ENDING}", False
        for file in _IN_RUNS:
            yield self.folder / name / file, True


def stamp_of(status: os.stat_result) -> Stamp:
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return stamp_of(status) if stat.S_ISREG(status.st_mode) else None
