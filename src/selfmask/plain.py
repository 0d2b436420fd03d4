"""Text of others, safe to show: a name or a note may hold what a terminal takes for an order."""

from __future__ import annotations

import unicodedata


def plain(text: object, *, keep: str = "") -> str:
    """The text with what is no visible character, nor a space or one of `keep`, written as an escape: `\\x1b`.

    That is every control character (C0, C1, line breaks), marks that turn the direction of writing, other invisible
    ones, halves of characters (lone surrogates), and what Unicode leaves to others. The result can be encoded.
    """
    letters = str(text)
    if letters.isprintable():
        return letters
    return "".join(letter if _is_harmless(letter, keep) else ascii(letter)[1:-1] for letter in letters)


def _is_harmless(letter: str, keep: str) -> bool:
    return letter.isprintable() or letter in keep or unicodedata.category(letter) == "Zs"
