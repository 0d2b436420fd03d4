"""Values of JSON are taken only as what they are expected to be; all else is a ValueError."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfmask import checked


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "NaN",
        "[Infinity]",
        '{"a": -Infinity}',
        "1e999",
        '{"a": 1, "a": 2}',
        "[" * 100_000,
        "1" * 5000,
        b"\xff",
        b'"\xed\xa0\x80"',
    ],
)
def test_what_is_no_document(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (of any kind)
        checked.document(text)


def test_documents() -> None:
    assert checked.document(b'\xef\xbb\xbf{"a": [1, 2.5, null, true, "\xc3\xa4"]}') == {"a": [1, 2.5, None, True, "ä"]}
    assert math.isnan(checked.document("NaN", finite=False))
    with pytest.raises(ValueError, match="at most 10"):
        checked.document("[1, 2, 3, 4]", most=10)


BAD: list[tuple[Callable[[Any], object], list[Any]]] = [
    (checked.mapping, [None, [], "x", 1, dict.fromkeys(map(str, range(1001)))]),
    (checked.text, [None, 1, b"x", "\ud800", "x" * 70_000]),
    (checked.printable, ["\x1b[2J", "\u202e", "a\tb", "\0"]),
    (checked.flag, [0, 1, None, "true"]),
    (checked.count, [True, -1, 1.0, "1", None, 2**63]),
    (checked.number, [True, "1", None, math.nan, math.inf, 10**400]),
    (checked.share, [-0.1, 1.1, math.nan]),
    (checked.sha256, ["", "0" * 63, "F" * 64, "g" * 64, 0]),
    (lambda value: checked.items(value, checked.count, most=2), [None, {}, "12", [1, 2, 3], [1, "2"]]),
    (lambda value: checked.one_of(value, ("a", "b")), ["c", None, ["a"], "a" * 2000]),
    (checked.plain, [math.nan, [math.inf], {"a": ["\ud800"]}, [0] * 20_000, object()]),
]


@pytest.mark.parametrize(("check", "value"), [(check, value) for check, values in BAD for value in values])
def test_what_is_refused(check: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its text is looked at below)
        check(value)
    assert len(str(caught.value)) < 300


def test_what_is_taken() -> None:
    assert checked.items([1, 2], checked.count) == (1, 2)
    assert (checked.number(1), checked.share(0), checked.count(7, least=7, most=7)) == (1.0, 0.0, 7)
    assert checked.optional(None, checked.count) is None
    assert checked.printable("a\nä 漢字") == "a\nä 漢字"
    assert checked.plain({"a": [1, 0.5, None, True, "x"]}) == {"a": [1, 0.5, None, True, "x"]}
    with pytest.raises(ValueError, match="'b' is missing"):
        checked.member({"a": 1}, "b")


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert checked.content(tmp_path / "a", most=5) == b"12345"
    with pytest.raises(ValueError, match="larger than 4"):
        checked.content(tmp_path / "a", most=4)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="not a regular file"):
            checked.content(path)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(OSError):  # noqa: PT011
            checked.content(path)
