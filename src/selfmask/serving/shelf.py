"""The folder of masks that is served: names that requests may use, and files that they add and remove."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import BadRequestError, MaskWriteError, TakenNameError, UnknownModelError
from ..files import remove_temporaries, sync_folder, write_atomically
from ..maskfile.layout import NAME
from ..shelf import ENDING, MaskFolder, Stamp, stamp_of

FROZEN = "frozen"
"""The name that the backbone itself goes by."""

_A_DAY = 86_400.0  # seconds; no upload takes that long


class Shelf(MaskFolder):
    """A folder of masks whose names come from requests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._writing = threading.Lock()
        remove_temporaries(folder, age=_A_DAY)

    def may_be(self, name: str) -> bool:
        """Few characters: names stand in addresses and in answers."""
        return NAME.fullmatch(name) is not None

    def names(self) -> list[str]:
        """All that have a file, in order; that of the backbone has none."""
        return [name for name in super().names() if name != FROZEN]

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


def checked_name(name: str) -> str:
    """A name that a mask may be given."""
    if not NAME.fullmatch(name) or name == FROZEN or name.endswith(ENDING):
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
        yield descriptor, stamp_of(os.fstat(descriptor))
    finally:
        os.close(descriptor)
