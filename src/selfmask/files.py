"""Files: written whole or not at all, and the names of those that a run folder holds."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from .errors import RunWriteError, SelfmaskError


class RunFile(StrEnum):
    """The files of a run folder."""

    CONFIG = "config.json"
    ENVIRONMENT = "environment.json"
    LOG = "log.jsonl"
    EVENTS = "events"
    LOCK = "lock"
    LAST = "checkpoints/last.pt"
    BEST = "checkpoints/best.pt"
    MASK = "mask.smn"
    TUNED = "tuned.safetensors"
    SCORES = "scores.json"
    BAD_IMAGES = "bad_images.json"
    SEEN = "seen.bin"
    RESULT = "result.json"
    REPORT = "report.html"
    CELLS = "cells"
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
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        if path.exists() and not path.is_file():  # a device would be replaced by a file
            raise IsADirectoryError("it is a folder") if path.is_dir() else OSError("it is not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Opened by hand so that the kernel applies the umask: to read that is to set it, for all threads.
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise error_type(
            f"cannot write {path}",
            expected="a file name in a folder that can be written, with room on the disk",
            found=getattr(error, "strerror", None) or error,
            todo="choose another place; whatever stood at this name is untouched",
        ) from error
    finally:  # on Ctrl-C too; after success there is nothing left to remove
        with suppress(OSError, ValueError):
            temporary.unlink()
    return len(data)
