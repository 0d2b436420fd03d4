"""Text of others is shown, and orders nothing."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfmask.plain import plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Äpfel 図 🍎 [red]", "Äpfel 図 🍎 [red]"),
        ("wide\u3000and\xa0hard spaces", "wide\u3000and\xa0hard spaces"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("\x9b31m \x90 \x85", r"\x9b31m \x90 \x85"),
        ("a\u202etxt.exe\u2066\u200f", r"a\u202etxt.exe\u2066\u200f"),
        ("half \ud83d and byte \udcff", r"half \ud83d and byte \udcff"),
        ("two\nlines\r\t\b\x00\x7f\u2028", r"two\nlines\r\t\x08\x00\x7f\u2028"),
        ("\U000e0041\ue000", r"\U000e0041\ue000"),
    ],
)
def test_what_is_not_visible_becomes_an_escape(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_every_character_there_is() -> None:
    for number in range(sys.maxunicode + 1):
        shown = plain(chr(number))
        shown.encode()
        assert shown == chr(number) or (shown.isascii() and shown.isprintable())
        if unicodedata.category(chr(number)) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            assert shown != chr(number)


@given(st.text(st.characters(codec=None), max_size=50))
def test_lines_can_be_kept_and_nothing_is_escaped_twice(text: str) -> None:
    assert plain(text, keep="\n").count("\n") == text.count("\n")
    assert plain(plain(text)) == plain(text)
