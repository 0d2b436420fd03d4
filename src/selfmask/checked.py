"""Files that somebody else wrote, JSON above all: every value is taken only as what it is expected to be.

All files that we read pass through here: mask manifests, what cascades and tuned weights say of themselves, heads, and
the files of a run folder. What does not fit is a ValueError that says so in a line; whoever reads the file turns that
into the error that belongs to it.
"""

from __future__ import annotations

import json
import math
import os
import stat
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")
MAX_DOCUMENT = 8 << 20
"""Bytes of a JSON document; the longest that we write, of a mask of 10,000 tensors, has 2 MB."""
MAX_TEXT = 1 << 16
MAX_NAME = 1 << 12
"""Of a key, and of a tensor."""
_SHOWN = 100
_FOLDER = 0x10  # of the attributes of a member of an archive


def content(path: Path, *, most: int = MAX_DOCUMENT) -> bytes:
    """The bytes of an ordinary file: no pipe that nobody writes to, no device, and no more than `most`."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it is larger than {most:,} bytes")
    return data


def archive(file: IO[bytes]) -> zipfile.ZipFile:
    """A file of torch.save, in which nothing takes more memory than it takes there: all is stored once, as it is."""
    found = zipfile.ZipFile(file)
    members, size = found.infolist(), file.seek(0, os.SEEK_END)
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("it is compressed, which torch.save does not do")
    if any(member.is_dir() or member.external_attr & _FOLDER for member in members):
        raise ValueError("it holds a folder, in whose place torch would give whatever is in memory")
    if sum(member.file_size for member in members) > size:
        raise ValueError(f"it claims to hold more than the {size:,} bytes that it has")
    return found


def document(text: str | bytes, *, most: int = MAX_DOCUMENT, finite: bool = True) -> Any:
    """The value that a JSON text stands for. No key may come twice, and, if `finite`, no number may be NaN or infinite.

    (Python's own reader takes both, and its writer then gives out what no other program can read.)
    """
    if len(text) > most:
        raise ValueError(f"a JSON document of {len(text)} bytes, where at most {most} are allowed")
    numbers: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _finite} if finite else {}
    try:
        return json.loads(
            text if isinstance(text, str) else text.decode("utf-8-sig"), object_pairs_hook=_once, **numbers
        )
    except RecursionError as error:
        raise ValueError("a JSON document that is nested too deeply") from error


def mapping(value: object, *, most: int = 1000) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise _unexpected("an object", value)
    if len(value) > most:
        raise ValueError(f"at most {most} entries expected, found {len(value)}")
    for name in value:
        text(name, most=MAX_NAME)
    return value


def member(fields: Mapping[str, Any], name: str) -> Any:
    """What an object has under a name."""
    if name not in fields:
        raise ValueError(f"{name!r} is missing")
    return fields[name]


def items(value: object, each: Callable[[object], T], *, most: int = 1000) -> tuple[T, ...]:
    """A list, each item of which passes `each`."""
    if not isinstance(value, list | tuple):
        raise _unexpected("a list", value)
    if len(value) > most:
        raise ValueError(f"at most {most} items expected, found {len(value)}")
    return tuple(each(item) for item in value)


def optional(value: object, check: Callable[[object], T]) -> T | None:
    return None if value is None else check(value)


def text(value: object, *, most: int = MAX_TEXT) -> str:
    if not isinstance(value, str):
        raise _unexpected("text", value)
    if len(value) > most:
        raise ValueError(f"text of at most {most} characters expected, found {len(value)}")
    value.encode()  # half a surrogate pair is no text; the error is a ValueError
    return value


def printable(value: object, *, most: int = MAX_TEXT) -> str:
    """Text to be shown: nothing in it but line breaks that is not printed as it stands."""
    found = text(value, most=most)
    if not found.replace("\n", "").isprintable():
        raise _unexpected("text without control characters", value)
    return found


def one_of(value: object, known: Iterable[str]) -> str:
    if (word := text(value, most=1000)) not in (known := tuple(known)):
        raise _unexpected(f"one of {', '.join(known)}", value)
    return word


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _unexpected("true or false", value)
    return value


def count(value: object, *, least: int = 0, most: int = 2**63 - 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _unexpected("a whole number", value)
    if not least <= value <= most:
        raise _unexpected(f"a whole number from {least} to {most}", value)
    return value


def number(value: object, *, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _unexpected("a number", value)
    try:
        found = float(value)
    except OverflowError as error:
        raise _unexpected("a number that a float can hold", value) from error
    if not math.isfinite(found) or not least <= found <= most:
        raise _unexpected(f"a finite number from {least} to {most}", value)
    return found


def share(value: object) -> float:
    return number(value, least=0.0, most=1.0)


def sha256(value: object) -> str:
    """In lower-case hexadecimal."""
    if not isinstance(value, str) or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise _unexpected("a SHA-256", value)
    return value


def plain(value: object, *, most: int = 10_000) -> Any:
    """Text, finite numbers, flags and null, and lists and objects of them: at most `most` values in all."""
    left = [most]

    def walk(value: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError(f"more than {most} values")
        if isinstance(value, str):
            text(value)
        elif isinstance(value, Mapping):
            for name, part in value.items():
                text(name, most=MAX_NAME)
                walk(part)
        elif isinstance(value, Sequence):
            for part in value:
                walk(part)
        elif value is not None and not isinstance(value, bool):
            number(value)

    walk(value)
    return value


def _unexpected(expected: str, found: object) -> ValueError:
    try:
        shown = repr(found)
    except ValueError:  # a number of more digits than Python prints
        shown = f"a {type(found).__name__}"
    return ValueError(f"{expected} expected, found {shown[:_SHOWN]}")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def _finite(digits: str) -> float:
    found = float(digits)
    if not math.isfinite(found):
        raise ValueError(f"{digits[:_SHOWN]} is larger than any number")
    return found


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key appears twice")
    return fields
