"""Test images are not trained on unless asked for, and `evaluate` says when they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from selfmask.data.partition import open_split
from selfmask.data.seen import count_seen
from tests.cli.inside import selfmask
from tests.cli.small import SMALL, fine, kept

WARNED = "was trained on"


@pytest.fixture(scope="module")
def held(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("held") / "run"
    done = fine(selfmask("adapt", photos, *SMALL, "--out", out))
    test = open_split(str(photos)).test
    assert f"{len(test)} of 60 labelled images, a fixed fifth of each class, are left for testing" in done.stdout
    return out


@pytest.fixture(scope="module")
def everything(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("everything") / "run"
    done = fine(selfmask("adapt", photos, *SMALL, "--split", "all", "--out", out))
    assert "left for testing" not in done.stdout
    return out


def test_by_default_what_evaluate_tests_with_was_not_seen(photos: Path, held: Path) -> None:
    test = open_split(str(photos)).test
    assert count_seen(held / "seen.bin", test) == 0
    assert json.loads((held / "result.json").read_text())["images"] == 60 - len(test)
    done = selfmask("evaluate", held, "--data", photos, "--json")
    assert json.loads(done.stdout)["test_images_seen"] == 0
    assert WARNED not in done.stderr


@pytest.mark.heavy
def test_what_was_seen_is_told(photos: Path, everything: Path, tmp_path: Path) -> None:
    number = len(open_split(str(photos)).test)
    assert kept(everything)["split"] == "all"
    for what in (everything, everything / "mask.smn"):
        done = selfmask("evaluate", what, "--data", photos, "--report", tmp_path / "page.html", "--no-cache")
        assert done.returncode == 0
        assert f"the run was trained on {number} of these test images" in done.stdout
        assert f"was trained on {number} of these test images" in (tmp_path / "page.html").read_text()
    done = selfmask("evaluate", everything, "--data", photos, "--json")
    assert json.loads(done.stdout)["test_images_seen"] == number
    shutil.copy(everything / "mask.smn", tmp_path / "mask.smn")  # without its run, nobody knows
    done = selfmask("evaluate", tmp_path / "mask.smn", "--data", photos, "--json")
    assert json.loads(done.stdout)["test_images_seen"] is None


def test_a_resumed_run_keeps_its_split(photos: Path, everything: Path) -> None:
    fine(selfmask("adapt", "--resume", everything))
    done = selfmask("adapt", "--resume", everything, "--split", "train")
    assert done.returncode == 2
    assert "split = 'all'" in done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("method", ["mask", "linear"])
def test_training_with_labels_remembers_too(photos: Path, tmp_path: Path, method: str) -> None:
    out = tmp_path / "run"
    fine(selfmask("train", photos, *SMALL, "--method", method, "--out", out))
    train, test, _ = open_split(str(photos))
    assert (count_seen(out / "seen.bin", train), count_seen(out / "seen.bin", test)) == (len(train), 0)
    file = out / ("mask.smn" if method == "mask" else "tuned.safetensors")
    (tmp_path / "train").mkdir()
    shutil.copytree(photos, tmp_path / "other" / "train")
    shutil.copytree(photos, tmp_path / "other" / "test")  # copies: another file, the same content
    done = selfmask("evaluate", file, "--data", tmp_path / "other", "--protocol", "knn", "--json")
    assert json.loads(done.stdout)["test_images_seen"] == len(train)


@pytest.mark.heavy
def test_cascades(photos: Path, everything: Path, tmp_path: Path) -> None:
    small = (*SMALL, "--experts", "2", "--components", "4", "--router", "kmeans")
    out = tmp_path / "cascade"
    done = selfmask("cascade", photos, *small, "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left for testing") == 1
    done = selfmask("evaluate", out, "--data", photos, "--protocol", "knn", "--json")
    assert json.loads(done.stdout)["test_images_seen"] == 0
    # A dispatcher that has seen them is part of the cascade.
    given = tmp_path / "given"
    done = selfmask("cascade", photos, *small, "--dispatcher", everything, "--out", given)
    assert done.returncode == 0, done.stderr
    done = selfmask("evaluate", given, "--data", photos, "--protocol", "knn", "--json")
    assert json.loads(done.stdout)["test_images_seen"] == len(open_split(str(photos)).test)
