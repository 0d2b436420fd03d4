"""Memory: what stays with a process between the steps of a long computation, and how much it may use."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

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


def give_back() -> None:
    """Return to the system what is free between blocks that are in use; for whoever reads a lot and keeps a little.

    Otherwise every little piece that stays would keep the memory around it from being used for anything larger. No
    effect with another C library than glibc.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return


_sharing = 1  # processes on this machine that do the same work side by side


def share_memory(processes: int) -> None:
    """From now on, this process is one of so many that share what memory there is."""
    global _sharing
    _sharing = processes


def memory_left(available: int, root: Path = Path("/")) -> int:
    """What is left to this process: of `available` bytes on the machine, and of every group that it is in.

    It is divided among the processes of a run: those of torchrun, and the experts that are trained side by side.
    (Processes that prepare views share one copy of the images.)
    """
    left = min([available, *_left_to_groups(root)])
    return max(left, 0) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // _sharing


def memory_budget(available: int, root: Path = Path("/")) -> int:
    """Half of what is left: what one thing may take that could do with less."""
    return memory_left(available, root) // 2


def _left_to_groups(root: Path) -> Iterator[int]:
    """What each control group above this process has left: containers, jobs of a scheduler, services.

    All of them count, not only the innermost, which need not have a limit. Inside a container, its own group is often
    at the top of what can be seen.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        lines = ["0::/"]
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        inner = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for depth in range(len(inner), -1, -1):
            if controllers == "":  # version 2
                yield from _left(mounted.joinpath(*inner[:depth]), ("memory.max", "memory.high"), "memory.current")
            elif "memory" in controllers.split(","):  # version 1
                group = mounted.joinpath("memory", *inner[:depth])
                yield from _left(group, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")


def _left(group: Path, limits: tuple[str, ...], usage: str, prefix: str = "") -> Iterator[int]:
    """The least of the group's limits, less what it uses; nothing if it has none, or cannot be seen."""
    try:
        statistics = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
        # Cached files count as used, but give way.
        used = int((group / usage).read_text()) - int(statistics.get(f"{prefix}inactive_file", 0))
        texts = [(group / name).read_text().strip() for name in limits if (group / name).is_file()]
        # In version 1: the least limit of all groups above, also of those that cannot be seen.
        texts += [text for key, text in statistics.items() if key == "hierarchical_memory_limit"]
        yield from (int(text) - used for text in texts if text != "max")
    except (OSError, ValueError):
        return
