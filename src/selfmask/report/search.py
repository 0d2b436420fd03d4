"""The page of a search: photos, and the images of a collection that are nearest to each."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..files import write_atomically
from .figures import DARK, LIGHT
from .page import template


@dataclass(frozen=True)
class Near:
    """An image that was found."""

    jpeg: bytes
    name: str
    label: str | None
    similarity: float

    @property
    def uri(self) -> str:
        return "data:image/jpeg;base64," + base64.b64encode(self.jpeg).decode()


@dataclass(frozen=True)
class Searched:
    """One photo, as a data URI, and the nearest images of each kind of vectors, by the title of that."""

    name: str
    uri: str
    rows: Mapping[str, Sequence[Near]]


def write_search(path: Path, title: str, found: Sequence[Searched]) -> None:
    """Write the page, whole or not at all; it needs no network."""
    page = template("search.html").render(title=title, light=LIGHT, dark=DARK, found=found)
    write_atomically(path, page.encode("utf-8", "backslashreplace"))
