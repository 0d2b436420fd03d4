"""`selfmask cascade`, and the other commands on what it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.inside import selfmask
from tests.cli.test_adapt import save_clothes

SMALL = ("--backbone", "selfmask/tiny", "--batch-size", "8", "--steps", "2", "--experts", "2", "--components", "4")
SMALL += ("--split", "all", "--no-gate")  # a gate would keep nothing that two steps find, and all masks would be one

# Whole cascades, one after the other; tests/commands/test_cascade.py looks at each stage.
pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    save_clothes(folder / "photos", 80)
    done = selfmask("cascade", folder / "photos", *SMALL, "--out", folder / "run", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # nothing but JSON on standard output
    assert (result["experts"], sum(result["sizes"])) == (2, 80)
    return folder


def test_it_leaves_what_embed_takes(place: Path) -> None:
    vectors = {}
    for words in ("conditional", "unconditional", "conditional --scale none"):
        out = place / f"{words.replace(' ', '')}.npz"
        done = selfmask("embed", place / "run", place / "photos", "--out", out, "--combination", *words.split())
        assert done.returncode == 0, done.stderr
        vectors[words] = np.load(out)["vectors"]
        assert vectors[words].shape == (80, 256)
    assert not np.allclose(vectors["conditional"], vectors["unconditional"])
    taken = vectors["conditional"].std(0) > 0
    np.testing.assert_allclose(vectors["conditional"].std(0, ddof=1)[taken], 1, atol=0.01)
    assert vectors["conditional --scale none"].std(0)[0] > 2 * vectors["conditional --scale none"].std(0)[40]


def test_it_leaves_what_evaluate_takes(place: Path) -> None:
    done = selfmask("evaluate", place / "run/cascade.smn", "--data", place / "photos", "--json")
    assert done.returncode == 0, done.stderr
    variants = ["frozen", "frozen+map", "dispatcher", "dispatcher+map", "conditional", "unconditional"]
    assert list(json.loads(done.stdout)["results"]["knn"]) == variants
    shown = selfmask(
        "evaluate", place / "run", "--data", place / "photos", "--scale", "none", "--report", place / "e.html"
    )
    assert shown.returncode == 0, shown.stderr
    assert "cascade" in shown.stdout
    assert "cascade, unconditional" in (place / "e.html").read_text()


def test_inspect_shows_the_parts(place: Path) -> None:
    done = selfmask("inspect", place / "run/cascade.smn")
    assert done.returncode == 0, done.stderr
    for words in ("2 experts", "dispatcher", "expert 1", "PCA, conditional", "selfmask/tiny"):
        assert words in done.stdout
    found = json.loads(selfmask("inspect", place / "run/cascade.smn", "--json").stdout)
    assert found["experts"] == 2
    assert found["bytes"]["file"] == (place / "run/cascade.smn").stat().st_size


def test_the_same_command_again_has_nothing_to_do(place: Path) -> None:
    before = (place / "run/cascade.smn").stat().st_mtime_ns
    done = selfmask("cascade", place / "photos", *SMALL, "--out", place / "run")
    assert done.returncode == 0, done.stderr
    assert "6 of 6 are already finished" in done.stdout
    assert (place / "run/cascade.smn").stat().st_mtime_ns == before


def test_experts_can_be_handed_out(place: Path, tmp_path: Path) -> None:
    done = selfmask("cascade", place / "photos", *SMALL, "--out", tmp_path / "run", "--prepare")
    assert done.returncode == 0, done.stderr
    commands = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("selfmask cascade expert")]
    assert len(commands) == 2
    early = selfmask("cascade", "finish", tmp_path / "run")
    assert early.returncode == 2
    assert "expert 0 is not trained" in early.stderr
    # On another machine, the images may be elsewhere.
    shutil.move(place / "photos", tmp_path / "elsewhere")
    try:
        for command in commands:
            done = selfmask(*command, "--data", tmp_path / "elsewhere")
            assert done.returncode == 0, done.stderr
        done = selfmask("cascade", "finish", tmp_path / "run", "--data", tmp_path / "elsewhere")
    finally:
        shutil.move(tmp_path / "elsewhere", place / "photos")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/cascade.smn").read_bytes() == (place / "run/cascade.smn").read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cascade", "expert", "NOWHERE", "--index", "0"), "not a run folder of `selfmask cascade`"),
        (("cascade", "finish", "NOWHERE"), "not a run folder of `selfmask cascade`"),
        (("cascade", "PHOTOS", *SMALL, "--components", "300", "--out", "OUT"), "300 components"),
        (("cascade", "PHOTOS", *SMALL, "--experts", "30", "--out", "OUT"), "fewer images than the experts need"),
        (("cascade", "PHOTOS", *SMALL, "--dispatcher", "NOWHERE", "--out", "OUT"), "does not exist"),
        (("cascade", "PHOTOS", *SMALL, "--experts", "0"), "experts is out of range"),
        (("cascade", "expert", "RUN", "--index", "7"), "no such expert"),
    ],
)
def test_mistakes_are_answered_with_what_to_do(place: Path, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    names = {"NOWHERE": tmp_path / "nowhere", "OUT": tmp_path / "out", "PHOTOS": place / "photos", "RUN": place / "run"}
    done = selfmask(*(names.get(word, word) for word in words))
    assert done.returncode == 2
    assert said in done.stderr
    assert "do:" in done.stderr or "expected:" in done.stderr


def test_unreadable_images_belong_to_no_cluster(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "photos", tmp_path / "photos")
    first = sorted((tmp_path / "photos").glob("*/*.png"))[0]
    first.write_bytes(b"no image")
    Image.new("L", (9, 9)).save(tmp_path / "photos/grey.png")
    done = selfmask("cascade", tmp_path / "photos", *SMALL, "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images"] == 80  # one unreadable, one more


def test_help_teaches() -> None:
    for words in (["cascade", "--help"], ["cascade", "expert", "--help"]):
        done = selfmask(*words)
        assert done.returncode == 0
        assert "expert" in done.stdout
    assert "--workers" in selfmask("cascade", "run", "--help").stdout
