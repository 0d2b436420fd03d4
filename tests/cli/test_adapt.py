"""`adapt`, `embed`, `evaluate` and `demo` as a user meets them, on real pictures."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from selfmask import FeatureMap
from selfmask.cli.adapt import NOTHING_GAINED
from selfmask.data import open_images
from selfmask.training.quality import Gain

from .inside import Done, selfmask

SELFMASK = str(Path(sys.executable).with_name("selfmask"))
TINY = ("--backbone", "selfmask/tiny", "--batch-size", "8")


def run(cwd: Path, *arguments: str) -> Done:
    with contextlib.chdir(cwd):
        return selfmask(*arguments)


def save_clothes(folder: Path, number: int) -> None:
    """Pictures of clothes, sorted into folders by class."""
    images = open_images("selfmask/fashion")
    assert images.labels is not None
    for index in range(number):
        file = folder / str(images.labels[index]) / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[index].permute(1, 2, 0).numpy()).save(file)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures in `photos` and a finished run in `runs/photos`, too short to gain anything."""
    folder = tmp_path_factory.mktemp("place")
    save_clothes(folder / "photos", 60)
    done = run(folder, "adapt", "photos", *TINY, "--steps", "2", "--json")
    assert done.returncode == NOTHING_GAINED == 3, done.stderr
    result = json.loads(done.stdout)  # nothing but JSON on standard output
    assert result["images"] == 49  # the rest is what `evaluate` tests with
    assert (result["kept"], result["active"], result["best_step"]) == ("identity", 1.0, 0)
    return folder


def test_adapt_leaves_a_mask_that_embed_and_evaluate_use(place: Path) -> None:
    assert json.loads((place / "runs/photos/config.json").read_text())["preset"] == "fast"
    done = run(place, "embed", "runs/photos", "photos", "--out", "photos.npz")
    assert done.returncode == 0, done.stderr
    vectors = np.load(place / "photos.npz")["vectors"]
    assert vectors.shape == (60, 256)
    done = run(place, "embed", "runs/photos", "photos", "--out", "white.npz", "--whiten", "auto")
    assert done.returncode == 0, done.stderr
    whiten = FeatureMap.load(place / "runs/photos/map.safetensors")  # of the model as it was in memory
    assert np.array_equal(np.load(place / "white.npz")["vectors"], whiten(torch.from_numpy(vectors)).numpy())
    assert str(np.load(place / "white.npz")["map"]) == whiten.sha256
    done = run(place, "evaluate", "runs/photos/mask.smn", "--data", "photos", "--json")
    assert done.returncode == 0, done.stderr
    sides = json.loads(done.stdout)["results"]["knn"]
    assert 0.3 < sides["frozen"]["top1"] <= 1
    assert sides["mask"] == sides["frozen"]  # the mask is the identity


def test_a_better_mask_is_a_success(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the images say: quality is found to rise."""
    rising = itertools.count(-1.0, 0.1)
    monkeypatch.setattr("selfmask.training.quality.Quality.__call__", lambda _: torch.full((1, 1), next(rising)))
    monkeypatch.setattr("selfmask.training.quality.Gain.of", lambda *_, **__: Gain(0.1, 0.01, 20))
    done = run(place, "adapt", "photos", *TINY, "--steps", "2", "--out", "runs/better")
    assert json.loads((place / "runs/better/result.json").read_text())["kept"] == "mask"
    assert done.returncode == 0, done.stderr
    assert "quality (without labels)" in done.stdout
    assert "Nothing better" not in done.stdout


@pytest.mark.heavy
def test_a_mask_that_is_kept_is_a_success(place: Path) -> None:
    """The demo: its gain is five times its error."""
    done = run(place, "adapt", "selfmask/fashion", "--backbone", "selfmask/tiny", "--out", "runs/kept")
    result = json.loads((place / "runs/kept/result.json").read_text())
    assert result["kept"] == "mask"
    assert result["quality_after"] > result["quality_before"]
    assert result["gain"] > 3 * result["gain_error"]
    assert done.returncode == 0, done.stderr
    assert "quality (without labels)" in done.stdout
    assert "Nothing better" not in done.stdout


def test_without_a_gate_a_run_is_a_success(place: Path) -> None:
    done = run(place, "adapt", "photos", *TINY, "--steps", "1", "--no-gate", "--out", "runs/ungated", "--json")
    assert done.returncode == 0, done.stderr
    assert "kept" not in json.loads(done.stdout)


def test_help_lists_the_presets_and_the_exit_code(place: Path) -> None:
    words = run(place, "adapt", "--help").stdout
    for word in ("fast", "paper", "reference", "exit code is 3"):
        assert word in " ".join(words.split()), word


def test_a_run_is_neither_overwritten_nor_resumed_with_other_settings(place: Path) -> None:
    again = run(place, "adapt", "photos", *TINY, "--steps", "2")
    assert again.returncode == 2
    assert "--resume" in again.stderr
    other = run(place, "adapt", "photos", *TINY, "--steps", "3", "--resume", "runs/photos")
    assert other.returncode == 2
    assert "steps = 3" in other.stderr
    same = run(place, "adapt", "photos", *TINY, "--steps", "2", "--resume", "runs/photos")
    assert same.returncode == NOTHING_GAINED, same.stderr
    assert "Nothing better than the frozen backbone was found" in same.stdout
    assert "report.html" in same.stdout


@pytest.mark.heavy  # test_resume interrupts runs, too, within this process
def test_ctrl_c_saves_and_says_how_to_go_on(place: Path) -> None:
    """In a process of its own, as signals and exit codes are."""
    command = [SELFMASK, "adapt", "photos", *TINY, "--steps", "500", "--out", "runs/cut"]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        log = place / "runs/cut/log.jsonl"
        while child.poll() is None and not (log.exists() and log.stat().st_size):  # it has taken steps
            time.sleep(0.05)
        second = run(place, "adapt", "photos", *TINY, "--steps", "500", "--resume", "runs/cut")
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate()
    assert second.returncode == 2
    assert "another run is writing" in second.stderr
    assert child.returncode == 130
    assert "--resume" in errors
    assert "Traceback" not in errors
    assert (place / "runs/cut/checkpoints/last.pt").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("adapt", "nowhere", *TINY), "nowhere"),
        (("adapt", "photos", "--backbone", "resnet5O"), "resnet50"),
        (("adapt", "photos", "--backbone", "selfmask/tiny", "--steps", "1", "--out", "runs/x"), "--batch-size"),
        (("adapt", "photos", *TINY, "--steps", "1", "--epochs", "1"), "give one of steps, epochs and budget"),
        (("embed", "nothing-like-this", "photos"), "not a run folder"),
        (("adapt", "photos", *TINY, "--track", "comet", "--out", "runs/y"), "wandb"),
        (("adapt", "[/old]", *TINY), "[/old]"),
    ],
)
def test_mistakes_are_told_with_the_remedy(place: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run(place, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.heavy
def test_the_demo_measures_before_and_after(tmp_path: Path) -> None:
    done = run(tmp_path, "demo", "--steps", "2")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "runs/demo/result.json").read_text())
    assert {"rows", "mask_bytes", "map_bytes", "base_bytes", "seconds", "seed"} <= set(result)
    assert result["rows"]["frozen"]["knn"] > 0.75  # the bundled backbone is a real one
    assert result["rows"]["frozen+map"]["knn"] > result["rows"]["frozen"]["knn"] + 0.02  # and a map a real rival
    assert result["mask_bytes"] < result["base_bytes"] / 20
    assert "k-NN (k = 20)" in done.stdout
    assert "frozen + map" in done.stdout
    again = run(tmp_path, "demo", "--steps", "2", "--json")
    assert json.loads(again.stdout)["rows"] == result["rows"]
