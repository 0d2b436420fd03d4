"""`predict`, `curate`, `check` and `adapt --start`, as a user calls them, on pictures of which the truth is known."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.cli.adapt import NOTHING_GAINED
from selfmask.cli.check import DRIFTED
from selfmask.commands.check import check, gain_of_run
from selfmask.commands.opening import load_embedder
from selfmask.data import open_images
from selfmask.evaluation.drift import drift_between
from selfmask.evaluation.predicting import learned_from
from selfmask.objectives.heads import LinearHead
from selfmask.training.quality import Gain

from ..cli.inside import selfmask

TINY = "selfmask/tiny"


def picture(index: int, split: str = "test") -> Image.Image:
    return Image.fromarray(open_images("selfmask/fashion", split=split)[index].permute(1, 2, 0).numpy())


def clothes(folder: Path, numbers: range, *, classes: bool = False, split: str = "test") -> Path:
    """Pictures of clothes; with classes, in folders of these."""
    images = open_images("selfmask/fashion", split=split)
    assert images.labels is not None
    for index in numbers:
        file = folder / (str(images.labels[index]) if classes else "") / f"{index:05d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[index].permute(1, 2, 0).numpy()).save(file)
    return folder


@pytest.fixture(scope="module")
def mask(tmp_path_factory: pytest.TempPathFactory) -> Path:
    masked = get_masked_model(load_backbone(TINY).model, MaskConfig(rule="topk", active_share=0.9))
    head = LinearHead(256, ["bag", "coat"])
    file = tmp_path_factory.mktemp("mask") / "mask.smn"
    masked.save_pretrained(file, head=head.tensors())
    return file


# ---- predict ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by", "ending"), [("probe", "csv"), ("knn", "parquet")])
def test_examples_tell_classes(tmp_path: Path, by: str, ending: str) -> None:
    examples = clothes(tmp_path / "labelled", range(120), classes=True, split="train")
    photos = clothes(tmp_path / "photos", range(60), classes=True)
    out = tmp_path / f"labels.{ending}"
    done = selfmask("predict", TINY, photos, "--examples", examples, "--by", by, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["images"], told["compared"]) == (60, 60)
    rows = list(csv.DictReader(out.open())) if ending == "csv" else pq.read_table(out).to_pylist()
    right = np.mean([Path(row["name"]).parts[0] == row["class"] for row in rows])
    assert told["accuracy"] == pytest.approx(right)
    assert right > 0.5  # of ten classes, with a dozen examples each
    assert all(0 < float(row["probability"]) <= 1 for row in rows)


def test_the_head_of_a_run_tells_classes(tmp_path: Path, mask: Path) -> None:
    photos = clothes(tmp_path / "photos", range(9))
    done = selfmask("predict", mask, photos, "--out", tmp_path / "labels.csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "labels.csv").open()))
    assert {row["class"] for row in rows} <= {"bag", "coat"}
    embedder = load_embedder(mask)
    assert embedder.head is not None
    assert all(float(row["probability"]) >= 0.5 for row in rows)


def test_what_cannot_be_predicted_is_said_before_the_work(tmp_path: Path, mask: Path) -> None:
    photos = clothes(tmp_path / "photos", range(3))
    for words, message in (
        (("predict", TINY, photos), "--examples"),
        (("predict", mask, photos, "--out", "labels.txt"), ".csv or .parquet"),
        (("predict", TINY, photos, "--examples", photos), "no labels"),
        (("predict", mask, photos, "--whiten", "auto"), "not whitened"),
    ):
        done = selfmask(*words)
        assert done.returncode == 2
        assert message in done.stderr


def test_probabilities_are_of_all_classes_and_sum_to_one() -> None:
    torch.manual_seed(0)
    centres = torch.eye(4)[[0, 1, 3]]  # no example of class 2
    labels = torch.tensor([0, 1, 3]).repeat(20)
    rows = centres.repeat(20, 1) + 0.1 * torch.randn(60, 4)
    for by in ("probe", "knn"):
        predictor = learned_from(rows, labels, list("abcd"), by=by)  # type: ignore[arg-type]
        found = predictor(centres)
        assert found.shape == (3, 4)
        torch.testing.assert_close(found.sum(1), torch.ones(3))
        assert found.argmax(1).tolist() == [0, 1, 3]
        assert bool((found[:, 2] == 0).all())


# ---- curate -----------------------------------------------------------------------------------------------------


def test_planted_duplicates_and_outliers_are_found(tmp_path: Path) -> None:
    photos = clothes(tmp_path / "photos", range(150))
    for index in range(5):
        own = picture(index)
        own.save(photos / f"copy{index}.png")
        own.save(photos / f"jpeg{index}.jpg", quality=60)
        ImageOps.mirror(own).save(photos / f"mirror{index}.png")
    random = np.random.default_rng(0)
    for index in range(3):
        Image.fromarray(random.integers(0, 256, (28, 28, 3), dtype=np.uint8)).save(photos / f"noise{index}.png")
    (photos / "broken.png").write_bytes(b"no image")
    done = selfmask("curate", TINY, photos, "--out", tmp_path / "out", "--label", "10")
    assert done.returncode == 0, done.stderr
    assert "1 images could not be read" in done.stdout
    found = json.loads((tmp_path / "out/curation.json").read_text())
    groups = [set(group) for group in found["duplicates"]]
    pairs = [(f"{i:05d}.png", name) for i in range(5) for name in (f"copy{i}.png", f"jpeg{i}.jpg", f"mirror{i}.png")]
    hits = [any({a, b} <= group for group in groups) for a, b in pairs]
    assert np.mean(hits) >= 0.8
    assert all(hit for hit, (_, name) in zip(hits, pairs, strict=True) if name.startswith("copy"))
    strangest = [name for name, _ in found["outliers"]][:6]
    assert {f"noise{i}.png" for i in range(3)} <= set(strangest)
    assert len(found["to_label"]) == 10
    assert not {"noise0.png", "broken.png"} & set(found["to_label"])
    rows = list(csv.DictReader((tmp_path / "out/images.csv").open()))
    assert len(rows) == 168
    assert {row["name"] for row in rows if row["label_first"]} == set(found["to_label"])
    page = (tmp_path / "out/curation.html").read_text()
    assert page.count("<img") > 20
    assert "http" not in page.replace("http-equiv", "")
    assert sorted(photos.iterdir()) == sorted({*photos.iterdir()})  # nothing was moved or deleted
    assert len(list(photos.iterdir())) == 169


# ---- check ------------------------------------------------------------------------------------------------------


def vectors(count: int, shift: float = 0.0, seed: int = 0) -> Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed)) + shift


def test_drift_is_told_from_luck() -> None:
    false = [drift_between(vectors(200, seed=2 * i), vectors(150, seed=2 * i + 1), seed=i) for i in range(20)]
    assert sum(each.proven() for each in false) <= 1
    assert all(abs(each.rate - 0.5) < 0.15 for each in false)
    shifted = drift_between(vectors(200), vectors(150, shift=0.6, seed=1))
    assert shifted.proven()
    assert shifted.rate > 0.8
    assert shifted.images == 150


def test_check_tells_a_shifted_set_from_an_unshifted_one(tmp_path: Path, mask: Path) -> None:
    old = clothes(tmp_path / "old", range(100), split="train")
    same = clothes(tmp_path / "same", range(100))
    dark = tmp_path / "dark"
    dark.mkdir()
    for index in range(100):
        ImageOps.invert(picture(index)).save(dark / f"{index}.png")
    found = {}
    for new in (same, dark):
        done = selfmask("check", mask, new, "--old", old, "--json")
        assert done.returncode in (0, NOTHING_GAINED, DRIFTED), done.stderr
        found[new.name] = json.loads(done.stdout)
        assert done.returncode == NOTHING_GAINED or found[new.name]["helps"]
    assert found["same"]["drifted"] is False
    assert found["dark"]["drifted"] is True
    assert found["dark"]["drift"]["rate"] > 0.9


def test_what_the_run_measured_is_known_from_its_folder(tmp_path: Path) -> None:
    assert gain_of_run("selfmask/tiny") is None
    for result, told in (
        ({"gain": 0.1, "gain_error": 0.04}, (0.1, 0.04)),
        ({"gain": 0.0, "gain_error": None}, None),  # nothing was kept
        ({"gain": "much", "gain_error": 0.04}, None),
    ):
        (tmp_path / "result.json").write_text(json.dumps(result))
        assert gain_of_run(tmp_path) == told
        assert gain_of_run(tmp_path / "mask.smn") == told


@pytest.mark.heavy
def test_exit_codes_say_whether_the_mask_helps(tmp_path: Path, mask: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = clothes(tmp_path / "photos", range(40))
    embedder = load_embedder(mask)
    identity = tmp_path / "identity.smn"
    get_masked_model(load_backbone(TINY).model, MaskConfig()).save_pretrained(identity)
    done = selfmask("check", identity, photos)
    assert done.returncode == NOTHING_GAINED
    assert "as with a mask that leaves all weights on" in done.stdout
    assert "leaves all weights on" not in selfmask("check", mask, photos).stdout
    assert check(embedder, open_images(str(photos))).drift is None
    monkeypatch.setattr("selfmask.commands.check.Gain.of", lambda *_, **__: Gain(0.1, 0.01, 30))
    assert selfmask("check", mask, photos).returncode == 0
    assert selfmask("check", mask, photos, "--old", photos).returncode == 0  # the same images: no drift
    monkeypatch.setattr("selfmask.commands.check.Gain.of", lambda *_, **__: Gain(0.01, 0.1, 30))
    assert selfmask("check", mask, photos).returncode == NOTHING_GAINED
    few = clothes(tmp_path / "few", range(5))
    assert "too few images" in selfmask("check", mask, few).stderr
    run = tmp_path / "run"
    run.mkdir()
    (run / "mask.smn").write_bytes(mask.read_bytes())
    (run / "result.json").write_text(json.dumps({"gain": 0.1, "gain_error": 0.04}))
    assert (
        "The run itself measured, at the best of its looks: gain +0.100"
        in selfmask("check", run / "mask.smn", photos).stdout
    )
    assert "no mask" in selfmask("check", TINY, photos).stderr


# ---- adapt --start ----------------------------------------------------------------------------------------------


def test_a_run_starts_from_a_mask(tmp_path: Path, mask: Path) -> None:
    photos = clothes(tmp_path / "photos", range(40))
    words = ("adapt", photos, "--start", mask, "--steps", "2", "--batch-size", "8")
    done = selfmask(*words, "--out", tmp_path / "run", "--json")
    assert done.returncode == NOTHING_GAINED, done.stderr
    assert json.loads(done.stdout)["kept"] == "start"
    kept = MaskedModel.from_pretrained(load_backbone(TINY).model, tmp_path / "run/mask.smn")
    began = MaskedModel.from_pretrained(load_backbone(TINY).model, mask)
    assert kept.sparsity() == began.sparsity()
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert (config["start"], config["backbone"]) == (str(mask), TINY)  # which the mask names
    missing = selfmask("adapt", photos, "--start", tmp_path / "no.smn", "--backbone", TINY)
    assert (missing.returncode, "does not exist" in missing.stderr) == (2, True)
