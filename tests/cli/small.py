"""Small runs of the command line, and what is asked of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selfmask.cli.adapt import NOTHING_GAINED
from tests.cli.inside import Done

SMALL = ("--backbone", "selfmask/tiny", "--steps", "2", "--batch-size", "8")


def kept(run: Path) -> dict[str, Any]:
    """What the run folder says of the run."""
    content: dict[str, Any] = json.loads((run / "config.json").read_text())
    return content


def fine(done: Done) -> Done:
    """Two steps may well gain nothing."""
    assert done.returncode in (0, NOTHING_GAINED), done.stderr
    return done


def refused(done: Done, *words: str) -> None:
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    for each in words:
        assert each in done.stderr
