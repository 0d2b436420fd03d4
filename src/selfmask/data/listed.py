"""Image files that somebody's list names: only below the folder they belong to, and all of them there."""

from __future__ import annotations

import ntpath
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from .. import checked
from ..errors import DataUnavailableError
from .images import printable

_SHOWN = 3


def relative(value: object) -> str:
    """A path below a folder, in one spelling, whatever the system; anything else is a ValueError."""
    text = checked.text(value, most=checked.MAX_NAME)
    path = "/".join(part for part in text.split("/") if part not in ("", "."))
    above = ".." in text.replace("\\", "/").split("/")
    if not path or above or text[0] in "/\\" or ntpath.splitdrive(text)[0] or "\0" in text:
        raise ValueError(f"a path below the folder of the images expected, found {text[:100]!r}")
    return path


def once(paths: Iterable[str]) -> None:
    """An image that is named twice is a ValueError: it could be learned from and tested with."""
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise ValueError(f"{path!r} appears twice")
        seen.add(path)


def check_whole(name: str, root: Path, paths: Sequence[str], data: Path) -> None:
    """Refuse a data set some of whose images are not below `root`, and links that lead out of there and of `data`.

    Folders are listed once each: to ask for every file would take much longer where there are a hundred thousand.
    """
    allowed = [os.path.realpath(root), os.path.realpath(data)]
    folders = defaultdict(list)
    for path in paths:
        folders[os.path.dirname(path)].append(path)  # noqa: PTH120 - a Path for each would take longer than all else
    gone: list[str] = []
    for folder, inside in folders.items():
        place = os.path.realpath(root / folder)
        _check_inside(place, allowed)
        try:
            with os.scandir(place) as entries:
                found = {entry.name: entry.is_symlink() for entry in entries}
        except OSError:  # no such folder, or one that may not be looked into
            found = {}
        for path in inside:
            own = os.path.basename(path)  # noqa: PTH119
            if own not in found:
                gone.append(path)
            elif found[own]:
                _check_inside(os.path.realpath(Path(place, own)), allowed)
    if gone:
        more = f" and {len(gone) - _SHOWN:,} more" if len(gone) > _SHOWN else ""
        raise DataUnavailableError(
            f"the data set {name} is not whole: {len(gone):,} of {len(paths):,} images are missing",
            expected=f"every image that its split names, below {printable(root)}",
            found=f"no {', '.join(gone[:_SHOWN])}{more}",
            todo=f"put them there; `selfmask datasets` says where to get {name}",
        )


def _check_inside(place: str, allowed: list[str]) -> None:
    if not any(place == each or place.startswith(os.path.join(each, "")) for each in allowed):  # noqa: PTH118
        raise ValueError(f"{place[:200]!r} lies outside the folder of the images")
