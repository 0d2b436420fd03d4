"""Folders of what was costly to make, kept for the next time: bounded, and never more than a loss of time if lost."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..files import remove_temporaries

_A_DAY = 86_400.0  # seconds; nothing takes that long to write


def cache_folder() -> Path:
    """The environment variable SELFMASK_CACHE, or a folder in the user's cache."""
    return Path(os.environ.get("SELFMASK_CACHE") or "~/.cache/selfmask/features").expanduser()


def drop_oldest(folder: Path, ending: str, limit: int) -> None:
    """Remove what was not used for the longest time, until all files of this ending take no more than `limit` bytes."""
    remove_temporaries(folder, age=_A_DAY)
    entries = []
    for path in folder.glob(f"*{ending}"):
        with contextlib.suppress(FileNotFoundError):  # another process drops, too
            status = path.stat()
            entries.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= limit:
            break
        path.unlink(missing_ok=True)
        total -= size


def used_now(path: Path) -> None:
    with contextlib.suppress(OSError):  # a folder that can only be read is of use, too
        os.utime(path)
