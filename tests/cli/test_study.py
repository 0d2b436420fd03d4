"""`selfmask study`: what it lists, plans, runs and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.studies.few import few_clothes, short  # noqa: F401  # a fixture

from .inside import selfmask


def test_all_studies_are_listed() -> None:
    text = selfmask("study", "list").stdout
    for name in ("supervised", "rules", "low-shot", "cascade", "ablations", "progressive", "selective", "variance"):
        assert name in text
    assert "rules" in json.loads(selfmask("study", "list", "--json").stdout)


@pytest.mark.heavy
@pytest.mark.usefixtures("short")
def test_a_study_runs_shows_the_papers_numbers_and_is_not_run_again(tmp_path: Path) -> None:
    data, out = few_clothes(tmp_path / "few.npz"), tmp_path / "out"
    options = ("study", "rules", "--data", data, "--seeds", "1", "--out", out)
    assert "topk 50%" in selfmask(*options).stdout
    page = (out / "results" / "rules.md").read_text()
    assert "0.921" in page  # the paper's, of cifar10, which it stands for
    assert "not visible" in page
    assert len(list((out / "cells").glob("adapt-*"))) == 3
    before = {path: path.stat().st_mtime_ns for path in (out / "cells").rglob("result.json")}
    again = selfmask(*options)
    assert "already finished" in again.stdout + again.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_pages_of_what_is_finished_without_a_run(tmp_path: Path) -> None:
    assert selfmask("study", "all", "--no-run", "--out", tmp_path).returncode == 0
    assert "Not measured" in (tmp_path / "results" / "README.md").read_text()
    assert "not run yet" in (tmp_path / "results" / "rules.html").read_text()
    assert not (tmp_path / "cells").exists()


def test_a_plan_opens_no_data() -> None:
    text = selfmask("study", "all", "--scale", "paper", "--dry-run").stdout
    assert "GPU hours" in text
    assert "supervised" in text
    assert "together" in text


def test_a_plan_in_miniature_is_in_minutes() -> None:
    text = selfmask("study", "rules", "--dry-run").stdout
    assert "minutes are of one core" in text
    assert "9 adapt" in text


def test_what_is_misspelt_is_named(tmp_path: Path) -> None:
    found = selfmask("study", "rule", "--out", tmp_path)
    assert found.returncode == 2
    assert "did you mean rules" in found.stderr
    found = selfmask("study", "rules", "--data", "cifra10", "--out", tmp_path)
    assert found.returncode == 2
    assert "did you mean cifar10" in found.stderr
    assert not (tmp_path / "cells").exists()
