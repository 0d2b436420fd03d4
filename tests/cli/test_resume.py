"""`--resume RUN`: the run knows what it was asked for."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from selfmask.cli.display import ConsoleDisplay
from tests.cli.inside import selfmask
from tests.cli.small import SMALL, fine, kept, refused


def state(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C when the log says so."""
    line = ConsoleDisplay.line

    def stopping(self: ConsoleDisplay, numbers: Mapping[str, Any]) -> None:
        line(self, numbers)
        if numbers["step"] == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ConsoleDisplay, "line", stopping)


EVERY = ("--log-every", "1", "--checkpoint-every", "10", "--steps", "4", "--batch-size", "8")


@pytest.mark.parametrize("verb", ["adapt", "train"])
def test_resume_needs_nothing_else(photos: Path, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (verb, photos, "--backbone", "selfmask/tiny", *EVERY, "--flip-p", "0.3", "--lr", "25", "--max-bad", "0.1")
    fine(selfmask(*words, "--out", tmp_path / "whole"))
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        assert selfmask(*words, "--out", tmp_path / "cut").returncode == 130
    before = state(tmp_path / "cut")
    assert "mask.smn" not in before
    for option, value, said in (
        ("--steps", "5", "steps = 4"),
        ("--lr", "1", "lr = 25.0"),
        ("--backbone", "resnet18", "'selfmask/tiny'"),
        ("--preset", "paper", "preset = 'fast'"),
        ("--rule", "topk", "mask.rule = 'threshold'"),
        ("--out", str(tmp_path / "other"), "--resume and --out name different folders"),
    ):
        refused(selfmask(verb, "--resume", tmp_path / "cut", option, value), said)
    refused(selfmask(verb, tmp_path, "--resume", tmp_path / "cut"), f"images = {str(photos.resolve())!r}")
    assert state(tmp_path / "cut") == before
    monkeypatch.chdir(tmp_path)  # from anywhere
    fine(selfmask(verb, "--resume", "cut", "--log-every", "2", "--steps", "4"))
    assert (tmp_path / "cut/mask.smn").read_bytes() == (tmp_path / "whole/mask.smn").read_bytes()


def test_a_run_of_another_verb_or_none_is_not_resumed(long: Path, tmp_path: Path) -> None:
    refused(selfmask("train", "--resume", long), "selfmask adapt --resume")
    refused(selfmask("adapt", "--resume", tmp_path), "not a run folder of `selfmask adapt`")
    (tmp_path / "config.json").write_text('{"verb": "adapt", "config": {"steps": 3, "stpes": 1}}')
    refused(selfmask("adapt", "--resume", tmp_path), "stpes")
    (tmp_path / "config.json").write_text("{")
    refused(selfmask("adapt", "--resume", tmp_path), "cannot be parsed")


def test_pretraining_goes_on_too(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    fine(selfmask("pretrain", photos, "--labels", "--steps", "2", "--batch-size", "8", "--out", out))
    config = kept(out)["config"]
    assert (config["steps"], config["epochs"], config["weight_decay"]) == (2, None, 5e-4)  # as suits labels
    refused(selfmask("pretrain", "--resume", out, "--no-labels"), "labels = True")
    assert "tiny.safetensors" in fine(selfmask("pretrain", "--resume", out)).stdout


def test_nothing_to_work_on_is_said() -> None:
    refused(selfmask("adapt"), "no images were given")


def test_cascades_and_comparisons_know_all_their_settings(photos: Path, tmp_path: Path) -> None:
    words = ("--experts", "1", "--components", "4", "--router", "kmeans", "--rule", "topk", "--flip-p", "0.1")
    fine(selfmask("cascade", photos, *SMALL, *words, "--out", tmp_path / "cascade"))
    config = kept(tmp_path / "cascade")["config"]
    assert (config["experts"], config["adapt"]["mask"]["rule"]) == (1, "topk")
    before = state(tmp_path / "cascade")
    refused(selfmask("cascade", "--resume", tmp_path / "cascade", "--flip-p", "0.2"), "adapt.views.flip_p = 0.1")
    assert state(tmp_path / "cascade") == before
    again = fine(selfmask("cascade", "--resume", tmp_path / "cascade"))
    assert "5 of 5 are already finished" in again.stdout

    words = ("--methods", "frozen", "--label-fractions", "0.5", "--seeds", "1", "--adapt-steps", "3", "--norm", "adapt")
    fine(selfmask("compare", photos, *SMALL, *words, "--out", tmp_path / "compare"))
    config = kept(tmp_path / "compare")["config"]
    assert (config["train"]["steps"], config["adapt"]["steps"], config["adapt"]["batch_size"]) == (2, 3, 8)
    assert config["train"]["mask"]["norm"] == config["adapt"]["mask"]["norm"] == "adapt"
    refused(selfmask("compare", "--resume", tmp_path / "compare", "--norm", "frozen"), "train.mask.norm = 'adapt'")
    fine(selfmask("compare", "--resume", tmp_path / "compare", "--methods", "frozen,linear"))  # more may be added
    done = fine(selfmask("compare", "--resume", tmp_path / "compare", "--json"))
    assert set(json.loads(done.stdout)["cells"]) == {"frozen-0.5-0", "linear-0.5-0"}
