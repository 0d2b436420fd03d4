"""Images in shards: which files a user means by a path, a folder, a pattern or a URL, and what reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import NoImagesError
from .folders import SPLITS, is_hidden
from .images import EXTENSIONS, printable
from .places import LocalFile, Place, expanded, is_url, place_of
from .records import RecordImages
from .tables import open_parquet
from .tars import open_tars
from .videos import ENDINGS, open_videos

_READERS: dict[str, Callable[[Sequence[Place], str | None], RecordImages]] = {
    ".tar": lambda shards, _: open_tars(shards),
    ".parquet": open_parquet,
}
KINDS = tuple(_READERS)
_FILES = _READERS | dict.fromkeys(ENDINGS, open_videos)


def is_sharded(where: str) -> bool:
    """Whether this is a file, a pattern in braces or a URL that is read here."""
    return is_url(where) or _kind(_column(where)[0]) in _FILES


def open_sharded(where: str) -> RecordImages:
    """The images of such files. After a `#` comes the column of a parquet file that has them, or a rate of frames."""
    path, column = _column(where)
    if (kind := _kind(path)) not in _FILES:
        raise NoImagesError(
            f"cannot read images from {where}",
            expected=f"a URL ending in {' or '.join(KINDS)}, or of a video",
            todo="check the address",
        )
    return _FILES[kind]([place_of(each) for each in expanded(path)], column)


def _column(where: str) -> tuple[str, str | None]:
    path, mark, column = where.rpartition("#")
    return (path, column) if mark and _kind(path) in (".parquet", *ENDINGS) else (where, None)


def open_folder_of_shards(root: Path, split: str) -> RecordImages | None:
    """The images of all shards in a folder, in the order of their names; None if it is no folder of shards.

    With sub-folders `train` and `test` (or `val`), those of the one that `split` picks.
    """
    parts = [name for name in SPLITS if (root / name).is_dir()]
    divided = "train" in parts and len(parts) > 1
    folder = root / next(name for name in SPLITS[split] if name in parts) if divided else root
    files = _shards_in(folder)
    if not files:
        return None
    if len(kinds := {_kind(file) for file in files}) > 1:
        raise NoImagesError(
            f"{printable(folder)} has shards of several kinds",
            expected=f"only {' or only '.join(KINDS)}",
            found=" and ".join(sorted(kinds)),
        )
    images = _READERS[kinds.pop()]([LocalFile(file) for file in files], None)
    images.undivided = not divided
    return images


def _shards_in(folder: Path) -> list[str]:
    """None, if there is anything else that images could be in."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if is_hidden(entry.name) or entry.name.startswith("_"):
                    continue
                if entry.is_dir() or Path(entry.name).suffix.lower() in EXTENSIONS:
                    return []
                if _kind(entry.name) in _READERS:
                    found.append(entry.path)
    except OSError:  # whoever opens it as a folder of images says so
        return []
    return sorted(found)


def _kind(path: str) -> str:
    return Path(path.partition("?")[0] if is_url(path) else path).suffix.lower()
