"""Names of classes from a file, for texts that say more than folder names do."""

from __future__ import annotations

from pathlib import Path

from .. import checked
from ..errors import MalformedDataError
from .images import printable

_LARGEST = 64 << 20  # bytes


def read_class_names(file: Path) -> list[str]:
    """One name a line, in the order of the classes; UTF-8, empty lines do not count."""
    try:
        text = checked.content(file, most=_LARGEST).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise MalformedDataError(
            f"cannot read class names from {printable(file)}",
            expected="a UTF-8 text file with one name per line",
            found=getattr(error, "strerror", None) or error,
            todo="check the path, or save the file as UTF-8",
        ) from error
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if not names or len(set(names)) < len(names):
        raise MalformedDataError(
            f"cannot use the class names in {printable(file)}",
            expected="a different name for each class, one per line",
            found=f"{next(name for name in names if names.count(name) > 1)!r} twice" if names else "no names",
        )
    return names
