"""`doctor`: what it says is there is there, and what it tries is tried."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from selfmask.commands import doctor

from ..cli.inside import selfmask


def test_facts_are_those_of_this_machine() -> None:
    done = selfmask("doctor", "--no-test", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["packages"]["torch"] == version("torch")
    assert len(told["gpus"]) == torch.cuda.device_count()
    assert 0 < told["memory_left_bytes"] <= told["memory_bytes"]
    assert told["tries"] == []
    assert told["extras"]["clip"] == told["extras"]["parquet"] == []


def test_what_is_missing_of_an_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda _: ["rich>=1", 'no-such-package>=2; extra == "far"'])
    assert doctor.extras() == {"far": ["no-such-package"]}
    shown = selfmask("doctor", "--no-test").stdout
    assert 'pip install "selfmask[far]"' in " ".join(shown.split())


def test_a_try_that_fails_is_told_and_has_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> str:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(doctor, "_TRIES", {"a run": doctor._plain, "torch.compile": fail})
    done = selfmask("doctor", "--json")
    assert done.returncode == 1
    first, second = json.loads(done.stdout)["tries"]
    assert (first["works"], "6 steps" in first["note"]) == (True, True)
    assert (second["works"], second["note"]) == (False, "no compiler")


def test_several_processes_need_no_extra_and_say_what_stopped_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def stopped(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.extend(command)
        said = "a note\nerror: the disk is full\n  do: make room\nTraceback\nChildFailedError:\n  error_file: <N/A>"
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setattr(subprocess, "run", stopped)
    with pytest.raises(RuntimeError, match=r"^error: the disk is full$"):
        doctor._several(tmp_path)
    assert "--track" not in asked  # TensorBoard is an extra, and was asked for here


@pytest.mark.heavy
def test_everything_works_on_this_machine() -> None:
    found = {each.name: each for each in doctor.tries(lambda line: None)}
    assert all(found[name].works for name in found), found
    assert "gloo" in found["several processes (DDP)"].note or torch.cuda.is_available()
