"""Every study at laptop scale, with runs of two steps on few pictures: all its numbers are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfmask.studies.catalogue import STUDIES
from selfmask.studies.output import write
from selfmask.studies.runner import run_study

from .few import short, small_scale, tasks_in  # noqa: F401  # a fixture

# The others have such a test of their own, which looks at what they found.
PLAIN = sorted(set(STUDIES) - {"clusters", "compression", "sparsity", "invariance"})


@pytest.mark.heavy
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", PLAIN)
def test_a_study_in_miniature(name: str, tmp_path: Path) -> None:
    found = run_study(STUDIES[name], small_scale(tmp_path), tasks_in(tmp_path / "out"))
    assert not found.missing
    assert found.values
    files = write(found, tmp_path / "results")
    assert {file.suffix for file in files} >= {".csv", ".md"}
    assert all(file.stat().st_size for file in files)
