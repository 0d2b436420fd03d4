"""What a run has seen of images: a file of short hashes, by which a later test knows what was learned from.

Eight bytes for each image, the beginning of the hash of its content (see identity.py), in ascending order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..files import write_atomically
from .identity import SHORT, short_hashes
from .sources import Images

_HASH = np.dtype(f"<u{SHORT}")
_LIMIT = 1 << 30  # bytes of a file that is believed


def write_seen(path: Path, images: Images, *, before: Path | None = None) -> None:
    """Write down what was learned from; `before` is the file of an earlier run that this one began with."""
    hashes = np.frombuffer(short_hashes(images), _HASH)
    if before is not None and (earlier := _read(before)) is not None:
        hashes = np.concatenate([hashes, earlier])
    write_atomically(path, np.unique(hashes).tobytes())


def count_seen(path: Path, images: Images) -> int | None:
    """How many of these images the run has seen; None if it kept no such file."""
    seen = _read(path)
    return None if seen is None else int(np.isin(np.frombuffer(short_hashes(images), _HASH), seen).sum())


def _read(path: Path) -> NDArray[np.uint64] | None:
    try:
        if not path.is_file() or path.stat().st_size > _LIMIT:
            return None
        data = path.read_bytes()
    except OSError:
        return None
    return np.frombuffer(data[: len(data) // SHORT * SHORT], _HASH)
