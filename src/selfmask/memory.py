"""Memory that stays with a process between the steps of a long computation."""

from __future__ import annotations

import ctypes
import os

# The names of malloc.h: give nothing back, and take large blocks from the heap like small ones.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_KEEP = {_TRIM_THRESHOLD: 2**31 - 1, _MMAP_MAX: 0}


def keep_memory() -> bool:
    """From now on, what this process frees stays with it and is used again. True if that was set.

    glibc returns large blocks at once, so on a CPU every step fetches the memory of its activations anew, page by page
    (`python -m benchmarks.keeping` has what that costs). It cannot be told to go back to how it began: its threshold
    for large blocks moves by itself, until somebody sets it. So this is for processes of our own, at their start, and
    never for a process that only calls us. What the user has set for malloc counts, and then nothing is set here. No
    effect with another C library.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc." in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version, libc.mallopt  # noqa: B018 (asks whether they exist)
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows there is no library without a name
        return False
    for parameter, value in _KEEP.items():
        libc.mallopt(parameter, value)
    return True
