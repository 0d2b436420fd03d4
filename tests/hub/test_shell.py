"""`selfmask push`, `pull` and `adapt --push`, and addresses where files can be given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from selfmask import MaskConfig, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.cli.adapt import NOTHING_GAINED
from selfmask.files import RunFile

from ..cli.inside import selfmask
from ..cli.test_adapt import save_clothes
from ..light import no_report
from .loopback import TOKEN, Hub


@pytest.fixture
def mask(tmp_path: Path) -> Path:
    masked = get_masked_model(load_backbone("selfmask/tiny").model, MaskConfig())
    masked.base_name = "selfmask/tiny"
    masked.save_pretrained(tmp_path / "mine.smn")
    return tmp_path / "mine.smn"


def test_push_pull_and_use(hub: Hub, mask: Path, tmp_path: Path) -> None:
    words = ("--licence", "cc0-1.0", "--data-name", "drawings", "--public")
    shown = selfmask("push", mask, "me/birds", "--dry-run", *words)
    assert shown.returncode == 0
    assert "selfmask/tiny" in shown.stdout
    assert hub.seen == []
    pushed = selfmask("push", mask, "me/birds", *words)
    commit = hub.repos["me/birds"].branches["main"]
    assert (pushed.returncode, pushed.stdout) == (0, f"pushed: hf://me/birds@{commit}\n")
    assert not hub.repos["me/birds"].private
    pulled = selfmask("pull", "me/birds", "--out", tmp_path / "here", "--json")
    assert json.loads(pulled.stdout)["commit"] == commit
    save_clothes(tmp_path / "photos", 4)
    vectors = []
    for what in (mask, tmp_path / "here", "hf://me/birds"):
        out = tmp_path / f"{len(vectors)}.npz"
        done = selfmask("embed", what, tmp_path / "photos", "--out", out)
        assert done.returncode == 0, done.stderr
        vectors.append(np.load(out)["vectors"])
    assert f"using hf://me/birds@{commit}" in done.stdout
    assert (vectors[0] == vectors[1]).all()
    assert (vectors[0] == vectors[2]).all()
    shown = selfmask("inspect", "hf://me/birds")
    assert "cc0-1.0" in shown.stdout
    assert "drawings" in shown.stdout


def test_what_cannot_be_pushed_is_told_before_the_run(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    save_clothes(tmp_path / "photos", 8)
    given = (tmp_path / "photos", "--backbone", "selfmask/tiny", "--out", tmp_path / "run")
    done = selfmask("adapt", *given, "--push", "me/birds")
    assert done.returncode == 2
    assert "hf auth login" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_is_pushed_at_its_end(hub: Hub, tmp_path: Path) -> None:
    save_clothes(tmp_path / "photos", 20)
    given = (tmp_path / "photos", "--backbone", "selfmask/tiny", "--steps", "2", "--batch-size", "8")
    with no_report():
        done = selfmask("adapt", *given, "--no-gate", "--out", tmp_path / "a", "--push", "me/birds")
        assert done.returncode == 0, done.stderr
        commit, files = hub.repos["me/birds"].commits[-1]
        assert f"pushed: hf://me/birds@{commit}" in done.stdout
        assert set(files) == {"README.md", RunFile.MASK, RunFile.MAP}
        hub.failing["commit"] = "drop"
        done = selfmask("adapt", *given, "--no-gate", "--out", tmp_path / "b", "--push", "me/cats")
    assert done.returncode == 2
    assert f"the run is finished: selfmask push {tmp_path / 'b'} me/cats" in done.stderr
    assert (tmp_path / "b" / RunFile.MASK).is_file()


@pytest.mark.heavy
def test_what_gained_nothing_is_not_pushed(hub: Hub, tmp_path: Path) -> None:
    save_clothes(tmp_path / "photos", 20)
    given = (tmp_path / "photos", "--backbone", "selfmask/tiny", "--steps", "1", "--batch-size", "8", "--lr", "1e-9")
    with no_report():
        done = selfmask("adapt", *given, "--out", tmp_path / "a", "--push", "me/birds")
    assert done.returncode == NOTHING_GAINED, done.stderr
    assert "not pushed" in done.stdout
    assert hub.repos == {}


@pytest.mark.heavy
def test_the_environment_says_which_hub(hub: Hub, mask: Path, tmp_path: Path) -> None:
    here = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}

    def shell(*words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "selfmask", *map(str, words)]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **here, **more}, timeout=300
        )

    assert shell("push", mask, "me/birds").returncode == 0
    assert shell("pull", "me/birds").returncode == 0
    asked = len(hub.seen)
    done = shell("pull", "me/birds", "--out", "again", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert len(hub.seen) == asked
    done = shell("pull", "me/cats", HF_HUB_OFFLINE="1")
    assert (done.returncode, "unset HF_HUB_OFFLINE" in done.stderr) == (2, True)
