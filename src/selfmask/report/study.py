"""The page of a study: its table beside the paper's numbers, its figures, and what became of the paper's claims."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from .figures import DARK, LIGHT
from .page import template


@dataclasses.dataclass(frozen=True)
class StudyPage:
    """All that a page shows, as text. figures: names of SVG files; missing: numbers that there are none of, and why."""

    title: str
    command: str
    recipe: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str
    figures: Sequence[str]
    missing: Sequence[str]
    claims_head: Sequence[str]
    claims: Sequence[Sequence[str]]


def render_study(page: StudyPage, folder: Path) -> str:
    """The page as text. Figures lie in the folder and become part of it: it needs no other file."""
    figures = [base64.b64encode((folder / name).read_bytes()).decode() for name in page.figures]
    return template("study.html").render(title=page.title, page=page, figures=figures, light=LIGHT, dark=DARK)
