"""What is left out of short runs where no test looks at it, and cases that one of their kind stands for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from selfmask.commands.cascade import outcome
from selfmask.report import page


@contextmanager
def no_report() -> Iterator[None]:
    """Within, reports are empty files: figures and maps take most of the time of a short run."""

    def write(path: Path, data: object) -> None:
        path.write_text("")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "write_report", write)
        patch.setattr(outcome, "write_cascade_report", write)
        patch.setattr(outcome, "_maps", lambda *_: ({}, []))
        yield


def mostly_heavy(cases: Sequence[Any], light: int = 1) -> list[Any]:
    """Cases of a test, of which only the first ones are in the first tier."""
    return [*cases[:light], *(pytest.param(case, marks=pytest.mark.heavy) for case in cases[light:])]
