"""`--resume RUN`: the run knows what it was asked for."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from selfmask.cli.display import ConsoleDisplay, ConsoleStages
from tests.cli.inside import selfmask
from tests.cli.small import SMALL, fine, kept, refused

pytestmark = pytest.mark.usefixtures("no_reports")


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


def stop_stages_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The same, where runs are stages of a larger job."""
    line = ConsoleStages.line

    def stopping(self: ConsoleStages, numbers: Mapping[str, Any]) -> None:
        line(self, numbers)
        if numbers["step"] == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ConsoleStages, "line", stopping)


EVERY = ("--log-every", "1", "--checkpoint-every", "10", "--steps", "4", "--batch-size", "8")


@pytest.mark.parametrize("verb", ["adapt", pytest.param("train", marks=pytest.mark.heavy)])
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
        ("--log-every", "2", "log_every = 1"),  # the gate looks where a line is logged
        ("--backbone", "resnet18", "'selfmask/tiny'"),
        ("--preset", "paper", "preset = 'fast'"),
        ("--rule", "topk", "mask.rule = 'threshold'"),
        ("--out", str(tmp_path / "other"), "--resume and --out name different folders"),
    ):
        refused(selfmask(verb, "--resume", tmp_path / "cut", option, value), said)
    refused(selfmask(verb, tmp_path, "--resume", tmp_path / "cut"), f"images = {str(photos.resolve())!r}")
    assert state(tmp_path / "cut") == before
    monkeypatch.chdir(tmp_path)  # from anywhere
    fine(selfmask(verb, "--resume", "cut", "--checkpoint-every", "2", "--steps", "4"))
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


@pytest.mark.heavy
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
    assert set(json.loads(done.stdout)["cells"]) == {"frozen-0.5-0", "frozen+map-0.5-0", "linear-0.5-0"}


def bitmaps(folder: Path, count: int) -> Path:
    """All of the same number of bytes."""
    chance = np.random.default_rng(0)
    folder.mkdir()
    for i in range(count):
        Image.fromarray(chance.integers(0, 256, (32, 32, 3), np.uint8)).save(folder / f"{i:03d}.bmp")
    return folder


@pytest.mark.heavy
@pytest.mark.parametrize("verb", ["adapt", "cascade"])
def test_replaced_images_are_noticed_and_put_back_it_goes_on(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """102 of 120, of the same size and with the same time."""
    images, cut = bitmaps(tmp_path / "images", 120), tmp_path / "cut"
    words = (verb, images, "--backbone", "selfmask/tiny", *EVERY, "--no-gate")
    words += ("--experts", "2", "--components", "2") if verb == "cascade" else ()
    with monkeypatch.context() as patch:
        stop_at(patch, 2) if verb == "adapt" else stop_stages_at(patch, 2)
        assert selfmask(*words, "--out", cut).returncode == 130
    before, kept = state(cut), {file: (file.read_bytes(), file.stat()) for file in sorted(images.iterdir())}
    for file, (data, times) in list(kept.items())[:102]:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    refused(selfmask(verb, "--resume", cut), "was started with other settings", "data = ")
    assert {**state(cut), "config.json": ""} == {**before, "config.json": ""}  # a cascade may change its own until then
    for file, (data, _) in kept.items():
        file.write_bytes(data)
    fine(selfmask(verb, "--resume", cut))
    fine(selfmask(*words, "--out", tmp_path / "whole"))
    name = "mask.smn" if verb == "adapt" else "cascade.smn"
    assert (cut / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.heavy
def test_a_folder_is_the_same_with_a_slash_at_its_end(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ph").symlink_to(photos)
    monkeypatch.chdir(tmp_path)
    for first, second in (("ph", "ph/"), ("ph/", "ph"), ("ph", "./ph/."), ("ph", tmp_path / "ph/")):
        out = f"run{len(list(tmp_path.iterdir()))}"
        fine(selfmask("adapt", first, *SMALL, "--out", out))
        fine(selfmask("adapt", second, "--resume", f"{out}/"))


@pytest.mark.parametrize("verb", ["adapt", "train", "pretrain", "cascade", "compare"])
def test_no_verb_writes_to_a_folder_of_other_files(photos: Path, tmp_path: Path, verb: str) -> None:
    files = {"config.json": '{"port": 80}', "report.html": "mine", ".cache.tmp": "mine", "log.jsonl": '{"level": 1}\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = state(tmp_path)
    words = ("--steps", "2", "--batch-size", "8") if verb == "pretrain" else SMALL
    refused(selfmask(verb, photos, *words, "--out", tmp_path), "contains files, but no run", "nothing was changed")
    assert state(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
