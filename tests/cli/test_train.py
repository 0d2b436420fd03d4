"""`selfmask train`, as users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.inside import selfmask
from tests.clips import small_open_clip, small_transformers

TINY = ("--backbone", "selfmask/tiny", "--steps", "2", "--batch-size", "8")


@pytest.mark.parametrize("method", ["mask", pytest.param("full", marks=pytest.mark.heavy)])
def test_train_then_embed_and_evaluate(photos: Path, tmp_path: Path, method: str) -> None:
    out = tmp_path / "run"
    done = selfmask("train", photos, *TINY, "--method", method, "--label-fraction", "0.5", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert "bytes" in done.stdout
    file = out / ("mask.smn" if method == "mask" else "tuned.safetensors")
    trained = json.loads((out / "result.json").read_text())
    assert trained["bytes"] == file.stat().st_size
    for what in (out, file):
        found = selfmask("evaluate", what, "--data", photos, "--protocol", "knn,head", "--no-cache", "--json")
        assert found.returncode == 0, found.stderr
        side = "mask" if method == "mask" else "trained"
        results = json.loads(found.stdout)["results"]
        assert results["head"][side]["top1"] == trained["accuracy"]  # the same images test, and none was trained on
        assert side in results["knn"]
        assert ("frozen" in results["knn"]) == (method == "mask")
    vectors = selfmask("embed", out, photos, "--out", tmp_path / "vectors.npz")
    assert vectors.returncode == 0, vectors.stderr


def test_a_head_of_other_classes_is_no_silent_zero(photos: Path, tmp_path: Path) -> None:
    assert selfmask("train", photos, *TINY, "--out", tmp_path / "run").returncode == 0
    other = tmp_path / "other"
    other.mkdir()
    for i, folder in enumerate(sorted(photos.iterdir())):
        folder_there = other / f"class {i}"
        folder_there.mkdir()
        for file in folder.iterdir():
            (folder_there / file.name).write_bytes(file.read_bytes())
    found = selfmask("evaluate", tmp_path / "run", "--data", other, "--protocol", "head", "--no-cache")
    assert found.returncode == 2
    assert "other classes" in found.stderr
    missing = selfmask("evaluate", "selfmask/tiny", "--data", photos, "--protocol", "head", "--no-cache")
    assert missing.returncode == 2
    assert "no head" in missing.stderr


@pytest.mark.parametrize("method", ["mask", pytest.param("lora", marks=pytest.mark.heavy)])
def test_clip_from_class_names(photos: Path, tmp_path: Path, method: str) -> None:
    """Zero-shot before, trained after, with the checkpoint's own tokenizer and both towers."""
    name = small_transformers(tmp_path / "clip")
    names = tmp_path / "names.txt"
    classes = sorted(folder.name for folder in photos.iterdir())
    names.write_text("\n".join(f"a kind of {each}" for each in classes))
    words = ("train", photos, "--backbone", name, "--head", "clip-text", "--steps", "2", "--batch-size", "8")
    done = selfmask(*words, "--method", method, "--out", tmp_path / "run", "--classes", names)
    assert done.returncode == 0, done.stderr
    assert "zero-shot" in done.stdout
    measuring = ("evaluate", tmp_path / "run", "--data", photos, "--protocol", "head", "--no-cache", "--json")
    assert "--backbone transformers/" in selfmask(*measuring).stderr  # a file does not choose what is loaded
    found = selfmask(*measuring, "--backbone", name)
    assert found.returncode == 0, found.stderr
    trained = json.loads((tmp_path / "run" / "result.json").read_text())
    (side,) = json.loads(found.stdout)["results"]["head"].values()
    assert side["top1"] == trained["accuracy"]
    names.write_text("only one\n")
    assert "the number of class names does not match" in selfmask(*words, "--classes", names).stderr


def test_open_clip_from_class_names(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from selfmask import MaskConfig, MaskedModel, TrainConfig, open_labelled, train
    from selfmask.backbones import load_backbone
    from selfmask.backbones.text import class_embeddings
    from selfmask.objectives.heads import TextHead

    name, weights = small_open_clip(tmp_path)
    images, test = open_labelled(photos)
    backbone = load_backbone(name, weights=weights)
    head = TextHead(*class_embeddings(name, images.classes or [], weights=weights), images.classes or [])
    config = TrainConfig.preset("paper", head="clip-text", steps=3, epochs=None, batch_size=8, track=())
    result = train(
        backbone.model,
        images,
        config,
        test=test,
        head=head,
        out=tmp_path / "run",
        preprocessing=backbone.preprocessing,
    )
    assert config.mask == MaskConfig(select="paper-vit", alpha_of="projection")
    assert 0 <= result.result["accuracy_before"] <= 1
    assert isinstance(result.model, MaskedModel)
    assert all("resblocks" in key.replace("/", ".") for key in result.model.sparsity() if key != "total")


def test_what_cannot_work_is_said(photos: Path, tmp_path: Path) -> None:
    no_text = selfmask("train", photos, *TINY, "--head", "clip-text", "--out", tmp_path / "a")
    assert no_text.returncode == 2
    assert "no text tower" in no_text.stderr
    (tmp_path / "empty").mkdir()
    assert selfmask("train", tmp_path / "empty", *TINY).returncode == 2
    share = selfmask("train", photos, *TINY, "--label-fraction", "2", "--out", tmp_path / "b")
    assert share.returncode == 2
    assert "share" in share.stderr
