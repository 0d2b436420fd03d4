"""Locks: one writer at a time, told apart from every other reason why a file cannot be locked."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from .errors import NoLocksError, RunBusyError, RunWriteError, SelfmaskError, unwritable


def _optional(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


_FCNTL, _MSVCRT = _optional("fcntl"), _optional("msvcrt")  # of Unix, and of Windows
_BUSY = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}  # EDEADLK: what Windows says after trying for long
_ATTEMPTS = 10
_held: set[Path] = set()  # locks are the process's: they would not keep two writers of one process apart
_reserving = threading.Lock()


class Lock:
    """A file that this process, and no other, holds until `close`, or until the process ends, however that comes.

    file: made if it is not there; its content does not matter. what: what is locked by it, for people.
    """

    def __init__(self, file: Path, what: object, error_type: type[SelfmaskError] = RunWriteError) -> None:
        self.file, self._place = file, file.parent.resolve() / file.name
        busy = RunBusyError(
            f"another run is writing to {what}", todo="wait for it to end, or choose another place: --out"
        )
        with _reserving:  # before the file is opened: closing it again would let go of the lock
            if self._place in _held:
                raise busy
            _held.add(self._place)
        try:
            self._descriptor: int | None = self._taken(what, busy, error_type)
        except BaseException:
            _held.discard(self._place)
            raise

    def _taken(self, what: object, busy: RunBusyError, error_type: type[SelfmaskError]) -> int:
        """The file, opened and locked."""
        for attempt in itertools.count():
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                if isinstance(error, FileNotFoundError) and attempt < _ATTEMPTS:
                    continue  # whoever held it has just removed the folder
                raise error_type(f"cannot write {what}", expected="a writable folder", **unwritable(error)) from error
            try:
                _take(descriptor)
            except OSError as error:
                os.close(descriptor)
                if error.errno in _BUSY:
                    raise busy from error
                raise NoLocksError(
                    f"cannot lock {what}: two runs that write to it could not be kept apart",
                    expected="a file system with locks",
                    found=error.strerror or error,
                    todo="choose a folder on a local disk: --out",
                ) from error
            if self._is_there(descriptor):
                return descriptor
            os.close(descriptor)  # whoever held it has removed it: by now there may be another
        raise AssertionError  # one of them is the last

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.file.stat())
        except FileNotFoundError:
            return False

    def close(self, *, remove: bool = False) -> None:
        """Let go of it; with `remove`, leave no file behind."""
        if self._descriptor is None:
            return
        windows = os.name == "nt"  # where what is open cannot be removed; elsewhere, what is let go of may be another's
        if remove and not windows:
            self._remove()
        os.close(self._descriptor)
        self._descriptor = None
        _held.discard(self._place)  # last: whoever opens the file before it is closed would lose their lock
        if remove and windows:
            self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            self.file.unlink()


def _take(descriptor: int) -> None:
    """An OSError says why not."""
    if _FCNTL is not None:
        _FCNTL.lockf(descriptor, _FCNTL.LOCK_EX | _FCNTL.LOCK_NB)  # unlike flock, not inherited by worker processes
    elif _MSVCRT is not None:
        _MSVCRT.locking(descriptor, _MSVCRT.LK_NBLCK, 1)
    else:
        raise OSError(errno.ENOLCK, "this system has no locks")
