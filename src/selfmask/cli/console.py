"""All that the command line prints goes through here, so that no name in a file can steer the terminal."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ..errors import BaseWarning, SelfmaskError
from ..plain import plain

_INSTEAD = str.maketrans({"█": "#", "·": ".", "±": "+-", "…": "..."})
"""For terminals that know few characters; others are shown as escapes there."""


class Console(rich.console.Console):
    """A console that shows text as it is: nothing in it is markup, an emoji or an order to the terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        self._told = bool(options.get("force_terminal"))

    @property
    def redraws(self) -> bool:
        """Whether lines can be drawn anew: not where only colours are forced (FORCE_COLOR, as notebooks set it)."""
        return self.is_terminal and (self._told or self.file.isatty())

    def say(self, *lines: str) -> None:
        """Lines of words; each stays one line, however long, whatever names are in it."""
        self.print(Text("\n".join(map(plain, lines))), soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        """Cells and titles of tables come by here, before their width is measured."""
        return super().render_str(plain(text), **{**options, "markup": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything comes by here; what rich itself has to order the terminal is marked as such."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(self._safe(segment.text), segment.style)

    def _safe(self, text: str) -> str:
        text = plain(text, keep="\n")
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return text.translate(_INSTEAD).encode(self.encoding, "backslashreplace").decode(self.encoding)
        return text


def print_json(value: Any) -> None:
    """One JSON value on standard output, in ASCII; numbers that JSON does not have (NaN, infinity) are null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def print_error(error: SelfmaskError, *, process: str | None = None) -> None:
    """process: the number of the one it is from, if not of the main one."""
    whose = "error:" if process is None else f"error in process {process}:"
    Console(stderr=True).print(Text.assemble((whose, "bold red"), f" {error}"), soft_wrap=True)


def error_as_json(error: SelfmaskError) -> dict[str, Any]:
    """What went wrong, for programs."""
    parts = {"expected": error.expected, "found": error.found, "do": error.todo}
    told = {name: str(part) for name, part in parts.items() if part is not None}
    return {"error": error.what, "kind": type(error).__name__, **told}


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """In place of `warnings.showwarning`: our own in a line, without the place in the code."""
    if issubclass(category, BaseWarning):
        if os.environ.get("RANK", "0") == "0":
            Console(stderr=True).print(Text.assemble(("warning:", "bold yellow"), f" {message}"), soft_wrap=True)
        return
    text = warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(plain(text, keep="\n"))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
