"""`selfmask index` and `selfmask search`, as a user calls them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from selfmask.backbones import TinyResNet
from selfmask.serving import building
from selfmask.serving.collection import Collection
from tests.embedding.samples import pictures, weights_file
from tests.serving.indexed import save_run
from tests.serving.served import BACKBONE as NAME
from tests.serving.served import photo, save_mask

from .inside import selfmask
from .small import refused


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two runs, thirty photos of three classes with one that is broken, a photo to look for, and a collection."""
    folder = tmp_path_factory.mktemp("index")
    for number, name in enumerate(("birds", "cats")):
        save_run(folder / f"runs/{name}", seed=number)
    pictures(folder / "photos", 30, classes=3, bad=(5,))
    (folder / "photo.png").write_bytes(photo(9))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(building, "POINTS", 12)
        done = selfmask("index", "runs/birds", "runs/cats", "photos", "--out", "c", "--json")
        assert done.returncode == 0, done.stderr
        (folder / "built.json").write_text(done.stdout)
        yield folder


def test_index_says_what_it_made(place: Path) -> None:
    built = json.loads((place / "built.json").read_text())
    assert (built["images"], built["resumed"]) == (29, 0)
    assert [space["name"] for space in built["spaces"]] == ["frozen", "birds", "cats"]
    assert built["bytes"] == sum(built["files"].values())
    assert built["bytes"] == sum(
        file.stat().st_size for file in (place / "c").rglob("*") if file.is_file() and file.name != "collection.json"
    )
    assert [name for name, _ in built["bad"]] == ["class2/0005.png"]
    assert (place / "c.bad.txt").read_text().startswith("class2/0005.png\t")
    done = selfmask("index", "selfmask/tiny", "photos", "--out", "plain")
    assert done.returncode == 0, done.stderr
    assert "29 images indexed in plain (frozen;" in done.stdout
    assert "1 images could not be read" in done.stdout
    refused(selfmask("index", "selfmask/tiny", "photos", "--out", "plain"), "is a collection already")


def test_search_shows_both_sides(place: Path) -> None:
    done = selfmask("search", "c", "photos/class0/0000.png", "photo.png", "-k", "3", "--page", "near.html")
    assert done.returncode == 0, done.stderr
    for words in ("photo.png", "frozen backbone", "birds", "cats", "class0/0000.png", "page: near.html"):
        assert words in done.stdout
    page = (place / "near.html").read_text()
    assert page.count("data:image/jpeg") == 2 * 3 * 3
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page


def test_search_finds_the_image_itself_first(place: Path) -> None:
    found = json.loads(selfmask("search", "c", "photos/class1/0004.png", "-k", "2", "--json").stdout)
    assert found["images"] == 29
    near = found["results"][0]["neighbours"]
    assert list(near) == ["frozen", "birds", "cats"]
    for side in near.values():
        assert (side[0]["name"], side[0]["label"]) == ("class1/0004.png", "class1")
        assert side[0]["similarity"] == pytest.approx(1, abs=1e-4)
        assert side[1]["similarity"] < side[0]["similarity"]
    only = json.loads(selfmask("search", "c", "photo.png", "--by", "cats", "--json").stdout)["results"][0]
    assert list(only["neighbours"]) == ["cats"]
    assert len(only["neighbours"]["cats"]) == 10
    frozen = json.loads(selfmask("search", "c", "photo.png", "--by", "frozen", "--json").stdout)["results"][0]
    both = json.loads(selfmask("search", "c", "photo.png", "--json").stdout)["results"][0]["neighbours"]
    assert frozen["neighbours"]["frozen"] == both["frozen"]
    assert only["neighbours"]["cats"] == both["cats"]


def test_a_collection_needs_nothing_but_its_backbone(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved elsewhere, with the runs and the photos gone."""
    shutil.copytree(place / "c", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    found = selfmask("search", "elsewhere", place / "photo.png", "-k", "1", "--json")
    assert found.returncode == 0, found.stderr


def test_a_mask_file_goes_by_its_own_name(place: Path, tmp_path: Path) -> None:
    save_mask(tmp_path / "season.smn", seed=4)
    done = selfmask("index", tmp_path / "season.smn", "photos", "--out", tmp_path / "c", "--whiten", "none", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["spaces"][1] == {"name": "season", "width": 256, "power": None}
    assert selfmask("search", tmp_path / "c", "photo.png", "--by", "season").returncode == 0


@pytest.mark.heavy
def test_a_backbone_with_weights_of_its_own(place: Path, tmp_path: Path) -> None:
    weights = weights_file(tmp_path)
    done = selfmask("index", NAME, "photos", "--weights", weights, "--out", tmp_path / "c")
    assert done.returncode == 0, done.stderr
    assert selfmask("search", tmp_path / "c", "photo.png").returncode == 0
    shutil.move(weights, tmp_path / "moved.safetensors")
    refused(selfmask("search", tmp_path / "c", "photo.png"), "error:")
    assert selfmask("search", tmp_path / "c", "photo.png", "--weights", tmp_path / "moved.safetensors").returncode == 0
    other = tmp_path / "other.safetensors"
    torch.manual_seed(1)
    save_file(TinyResNet().state_dict(), other)
    refused(selfmask("search", tmp_path / "c", "photo.png", "--weights", other), "fingerprint")


def test_what_cannot_be_is_refused(place: Path, tmp_path: Path) -> None:
    for words, text in (
        (("index", "runs/birds", "nowhere/", "--out", "x"), "does not exist"),
        (("index", "runs/none", "photos", "--out", "x"), "not a run folder"),
        (("index", "runs/birds", "photos", "--out", "x", "--whiten", "much"), "power"),
        (("index", "runs/birds", "photos", "--out", "photos"), "not a collection"),
        (("search", "nowhere", "photo.png"), "not a collection"),
        (("search", "photos", "photo.png"), "cannot be read"),
        (("search", "c", "nothing.png"), "cannot read nothing.png"),
        (("search", "c", "runs/birds/mask.smn"), "not an image"),
        (("search", "c", "photo.png", "--by", "dogs"), "no vectors of dogs"),
        (("search", "c", "photo.png", "--max-pixels", "3"), "pixels"),
    ):
        refused(selfmask(*words), text)
    assert not (place / "x").exists()
    assert not (place / "x.partial").exists()


def test_odd_values_are_answered(place: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    odd = ["", ".", "/dev/null", "/dev/zero", "/proc/self/mem", "x" * 5000, "\x1b[31m\udcff", str(tmp_path / "pipe")]
    for value in odd:
        for words in (
            ("search", value, "photo.png"),
            ("search", "c", value),
            ("search", "c", "photo.png", "--by", value),
            ("search", "c", "photo.png", "-k", value),
            ("index", value, "photos", "--out", tmp_path / "x"),
            ("index", "selfmask/tiny", "photos", "--out", value),
            ("index", "selfmask/tiny", "photos", "--out", tmp_path / "x", "--thumbnail-size", value),
        ):
            done = selfmask(*words)
            assert done.returncode in (0, 2), words
            assert "Traceback" not in done.stderr, words
            assert not {"\x1b", "\udcff"} & {*done.stdout, *done.stderr}, words


def test_names_with_orders_to_the_terminal_are_shown_as_text(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(6):
        Image.new("RGB", (20, 20), (40 * number, 90, 10)).save(tmp_path / f"photos/{number}\x1b[31m[bold].png")
    assert selfmask("index", "selfmask/tiny", tmp_path / "photos", "--out", tmp_path / "c").returncode == 0
    photo = tmp_path / "photos/3\x1b[31m[bold].png"
    done = selfmask("search", tmp_path / "c", photo, "-k", "2", "--page", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "\\x1b[31m[bold]" in done.stdout.replace("\n", "")
    assert "\x1b" not in done.stdout + (tmp_path / "page.html").read_text()


@pytest.mark.heavy
def test_a_cascade_is_indexed(photos: Path, tmp_path: Path) -> None:
    small = ("--backbone", "selfmask/tiny", "--steps", "2", "--batch-size", "8", "--experts", "2", "--components", "4")
    done = selfmask("cascade", photos, *small, "--router", "kmeans", "--out", tmp_path / "cascade")
    assert done.returncode == 0, done.stderr
    mask = save_mask(tmp_path / "mask.smn", seed=1)
    done = selfmask("index", mask, tmp_path / "cascade", photos, "--out", tmp_path / "c")
    assert done.returncode == 0, done.stderr
    with Collection.open(tmp_path / "c") as found:
        assert [space.about.kind for space in found.spaces.values()] == ["frozen", "mask", "conditional"]
    one = next(photos.rglob("*.png"))
    found = json.loads(selfmask("search", tmp_path / "c", one, "-k", "1", "--json").stdout)["results"][0]
    for near in found["neighbours"].values():
        assert near[0]["name"] == one.relative_to(photos).as_posix()
