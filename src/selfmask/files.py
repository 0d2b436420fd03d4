"""Files: written whole or not at all, and the names of those that a run folder holds."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import IO

from .errors import RunWriteError, SelfmaskError, unwritable

_TEMPORARY = re.compile(r"\.selfmask-[0-9a-f]{16}\.tmp")


class RunFile(StrEnum):
    """The files of a run folder."""

    CONFIG = "config.json"
    ENVIRONMENT = "environment.json"
    LOG = "log.jsonl"
    EVENTS = "events"
    LOCK = "selfmask.lock"
    LAST = "checkpoints/last.pt"
    BEST = "checkpoints/best.pt"
    MASK = "mask.smn"
    MAP = "map.safetensors"
    TUNED = "tuned.safetensors"
    SCORES = "scores.json"
    BAD_IMAGES = "bad_images.json"
    SEEN = "seen.bin"
    RESULT = "result.json"
    REPORT = "report.html"
    CELLS = "cells"
    JOBS = "jobs"
    FAILED = "failed.json"
    TOOK = "took.json"
    ROUTER = "router.safetensors"
    CASCADE = "cascade.smn"


class LogKey(StrEnum):
    """What the lines of a log say, where more than one reader asks for it."""

    STEP = "step"
    LOSS = "loss"
    GUESS = "ln_k"
    SPREAD = "spread"
    ACTIVE = "active"
    FLIPS = "flips"
    QUALITY = "quality"
    TROUBLE = "trouble"
    ANSWER = "answer"
    SECONDS = "seconds"


def write_atomically(path: Path, data: bytes | memoryview, error_type: type[SelfmaskError] = RunWriteError) -> int:
    """Write beside, flush to disk, then rename: whatever happens, `path` is the old file or the new one, whole."""
    try:
        if path.exists() and not path.is_file():  # a device would be replaced by a file
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "it is a folder")
            raise OSError(errno.EINVAL, "it is not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(data)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = unwritable(error) if isinstance(error, OSError) else {"found": str(error), "todo": "choose another name"}
        raise error_type(
            f"cannot write {path}; whatever stood at this name is untouched",
            expected="a file name in a folder that can be written, with room on the disk",
            **why,
        ) from error
    return len(data)


def write_folder(path: Path, files: Mapping[str, bytes], error_type: type[SelfmaskError] = RunWriteError) -> int:
    """A folder of these files, whole or not at all; one of the same files and no others is replaced."""
    temporary = path.parent / f".selfmask-{secrets.token_hex(8)}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        for name, data in files.items():
            with (temporary / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        if path.is_dir() and {each.name for each in path.iterdir()} <= set(files):
            for name in files:  # each is whole at any time; the folder's own name cannot be replaced in one step
                (temporary / name).replace(path / name)
        else:
            temporary.rename(path)  # which fails where there is something else
        sync_folder(path.parent)
    except OSError as error:
        raise error_type(
            f"cannot write {path}; whatever stood at this name is untouched",
            expected="a new folder, in one that can be written, with room on the disk",
            **unwritable(error),
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sum(map(len, files.values()))


@contextmanager
def replacing(path: Path, beside: Path | None = None) -> Iterator[IO[bytes]]:
    """A file to write, that takes the place of `path` when it is whole and on the disk, and else is removed.

    beside: the folder to write it in, if that should be another than where it will be.
    """
    temporary = (beside or path.parent) / f".selfmask-{secrets.token_hex(8)}.tmp"
    try:
        # Opened by hand so that the kernel applies the umask: to read that is to set it, for all threads.
        with os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:  # on Ctrl-C too; after success there is nothing left to remove
        with suppress(OSError, ValueError):
            temporary.unlink()


def sync_folder(folder: Path) -> None:
    """Names on the disk, too: without it, a power cut could bring back the file that was replaced."""
    with suppress(OSError):  # not everywhere can a folder be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_temporaries(*folders: Path, age: float = 0.0) -> None:
    """Remove what a process that was killed left half-written, for whoever knows that it is gone.

    age: seconds since they were written to, for whoever does not know.
    """
    for folder in folders:
        with suppress(OSError):
            for file in folder.iterdir():
                if _TEMPORARY.fullmatch(file.name) and (not age or time.time() - file.stat().st_mtime > age):
                    file.unlink(missing_ok=True)
