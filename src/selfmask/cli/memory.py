"""Memory that stays with the process between the steps of a long computation."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

# The names of malloc.h, and what they are by default; the threshold is the most that glibc itself would raise it to.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_DEFAULTS = {_TRIM_THRESHOLD: 64 << 20, _MMAP_MAX: 65536}
_KEEP = {_TRIM_THRESHOLD: 2**31 - 1, _MMAP_MAX: 0}
_lock, _depth = Lock(), 0


@contextmanager
def memory_kept() -> Iterator[None]:
    """Within, what is freed stays with the process and is used again; after the last exit it goes back to the system.

    glibc returns large blocks at once, so on a CPU every step fetches the memory of its activations anew, page by page
    (`python -m benchmarks.keeping` has what that costs). No effect with another C library.
    """
    _change(+1)
    try:
        yield
    finally:
        _change(-1)


def _change(by: int) -> None:
    global _depth
    libc = _glibc()
    if libc is None:
        return
    with _lock:
        before, _depth = _depth, _depth + by
        if bool(before) != bool(_depth):
            for parameter, value in (_KEEP if _depth else _DEFAULTS).items():
                libc.mallopt(parameter, value)
        if not _depth:
            libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version, libc.mallopt, libc.malloc_trim  # noqa: B018 (asks whether they exist)
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows there is no library without a name
        return None
    return libc
