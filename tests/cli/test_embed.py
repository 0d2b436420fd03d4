"""`selfmask embed` and `selfmask evaluate`, as a user calls them."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from selfmask import FeatureMap, MaskConfig, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.cli.embed import embed
from selfmask.cli.evaluate import evaluate
from selfmask.data import open_images
from selfmask.embedding.vectors import embed as embed_images
from selfmask.errors import EvaluationError, FeatureMapError, LabelsError, SelfmaskError
from selfmask.evaluation import knn_accuracy

from ..embedding.samples import pictures, weights_file

NAME = "selfmask/tiny"


def run(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(embed)
    app.command()(evaluate)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return weights_file(tmp_path)


@pytest.fixture
def mask(tmp_path: Path, weights: Path) -> Path:
    torch.manual_seed(1)
    backbone = load_backbone(NAME, weights=weights)
    masked = get_masked_model(backbone.model, MaskConfig(rule="topk", active_share=0.3))
    masked.save_pretrained(tmp_path / "mask.smn")
    return tmp_path / "mask.smn"


def test_embed_writes_vectors_and_lists_bad_files(tmp_path: Path, weights: Path) -> None:
    photos = pictures(tmp_path / "photos", 21, bad=(4,))
    out = tmp_path / "f.npz"
    result = run("embed", NAME, photos, "--weights", weights, "--out", out)
    assert result.exit_code == 0, result.output
    assert "20 vectors of length 256" in result.output
    with np.load(out) as file:
        assert file["vectors"].shape == (20, 256)
        assert "0004.png" not in file["names"]
    listed = (tmp_path / "f.npz.bad.txt").read_text()
    assert listed.startswith("0004.png\t")
    assert len(listed.splitlines()) == 1
    (photos / "0004.png").unlink()
    assert run("embed", NAME, photos, "--weights", weights, "--out", out).exit_code == 0
    assert not (tmp_path / "f.npz.bad.txt").exists()  # it was of the earlier file


def test_embed_leaves_a_file_that_only_has_the_name_of_a_list(tmp_path: Path, weights: Path) -> None:
    photos, notes = pictures(tmp_path / "photos", 9), tmp_path / "f.npz.bad.txt"
    notes.write_text("my own notes\n")
    assert run("embed", NAME, photos, "--weights", weights, "--out", tmp_path / "f.npz").exit_code == 0
    assert notes.read_text() == "my own notes\n"


def test_embed_json_is_json_alone(tmp_path: Path, mask: Path, weights: Path) -> None:
    photos = pictures(tmp_path / "photos", 9, bad=(8,))
    result = run("embed", mask, photos, "--weights", weights, "--out", tmp_path / "f.parquet", "--json")
    found = json.loads(result.stdout)
    assert (found["images"], found["rows"], found["width"], found["resumed"]) == (9, 8, 256, 0)
    assert found["bad"][0][0] == "0008.png"
    assert found["images_per_second"] > 0


def test_evaluate_shows_backbone_and_mask_side_by_side(tmp_path: Path, mask: Path, weights: Path) -> None:
    data = tmp_path / "data"
    pictures(data / "train", 45, classes=3)
    pictures(data / "test", 30, classes=3)
    options = ("evaluate", mask, "--data", data, "--weights", weights)
    found = json.loads(run(*options, "--k", 5, "--temperature", 0.07, "--json").stdout)
    assert (found["train_images"], found["test_images"], len(found["classes"])) == (45, 30, 3)
    assert (found["settings"]["k"], found["settings"]["temperature"], found["divided"]) == ([5], 0.07, True)
    backbone = load_backbone(NAME, weights=weights)
    train, test = open_images(data, split="train"), open_images(data, split="test")
    bank, queries = (embed_images(backbone.model, part, backbone.preprocessing)[0] for part in (train, test))
    assert train.labels is not None
    assert test.labels is not None
    expected = knn_accuracy(bank, train.labels, queries, test.labels, k=5, temperature=0.07)
    assert found["results"]["knn"]["frozen"]["top1"] == pytest.approx(expected)
    for protocol in ("knn", "linear"):
        assert found["results"][protocol]["mask"]["top1"] > 0.5  # three colours
    text = run(*options, "--report", tmp_path / "page.html").output
    for words in (
        "frozen backbone",
        "with the mask",
        "+ map",
        "k-NN (k = 20)",
        "k-NN (k = 200)",
        "linear probe",
        "using 45",
        "page.html",
        "worst",
    ):
        assert words in text
    assert "top-5" not in text  # of three classes
    assert "confusion matrix" in (tmp_path / "page.html").read_text()


def test_evaluate_with_few_labels_has_intervals(tmp_path: Path, weights: Path) -> None:
    data = pictures(tmp_path / "data", 60, classes=3)
    options = ("evaluate", NAME, "--data", data, "--weights", weights, "--protocol", "linear", "--label-fraction", 0.2)
    text = run(*options, "--seeds", 3).output
    assert "±" in text
    assert "10 labels per seed" in text
    assert "k-NN" not in text
    assert "classes have no label" not in text
    assert "classes have no label in a draw" in run(*options, "--uniform", "--label-fraction", 0.06).output


def test_evaluate_keeps_features_for_the_next_time(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SELFMASK_CACHE", str(tmp_path / "cache"))
    data = pictures(tmp_path / "data", 12, classes=3)
    options = ("evaluate", NAME, "--data", data, "--weights", weights, "--k", 5, "--json")
    without = json.loads(run(*options, "--no-cache").stdout)
    assert not (tmp_path / "cache").exists()
    assert json.loads(run(*options).stdout) == without
    assert len(list((tmp_path / "cache").iterdir())) == 2  # to learn from, and to test with
    assert json.loads(run(*options).stdout) == without


def test_evaluate_splits_what_is_not_divided(tmp_path: Path, weights: Path) -> None:
    data = pictures(tmp_path / "data", 60, classes=3, bad=(0,))
    result = run("evaluate", NAME, "--data", data, "--weights", weights, "--k", 5, "--json")
    found = json.loads(result.stdout)
    assert (found["train_images"], found["test_images"], found["left_out"], len(found["classes"])) == (47, 12, 1, 3)
    assert list(found["results"]["knn"]) == ["frozen", "frozen+map"]
    assert found["results"]["knn"]["frozen"]["top1"] > 0.5
    assert "no train and test splits" in result.stderr
    assert "1 images could not be read" in result.stderr
    again = run("evaluate", NAME, "--data", data, "--weights", weights, "--k", 5, "--json")
    assert json.loads(again.stdout) == found


def test_evaluate_needs_labels(tmp_path: Path, weights: Path) -> None:
    data = pictures(tmp_path / "data", 6)
    result = run("evaluate", NAME, "--data", data, "--weights", weights)
    assert isinstance(result.exception, LabelsError)
    assert "no labels" in str(result.exception)


def test_embed_fits_a_map_once_and_uses_it_ever_after(tmp_path: Path, weights: Path) -> None:
    """Whether all images come at once or in parts, and whichever parts these are."""
    whole, half = pictures(tmp_path / "whole", 40), pictures(tmp_path / "half", 20)
    options = ("--weights", weights, "--map", tmp_path / "a.safetensors", "--out")
    first = run("embed", NAME, whole, *options, tmp_path / "whole.npz", "--batch-size", 8)
    assert "a map was fitted to 40 images and written to" in first.output, first.output
    kept = (tmp_path / "a.safetensors").read_bytes()
    again = run("embed", NAME, half, *options, tmp_path / "half.npz", "--batch-size", 8, "--json")
    found = json.loads(again.stdout)
    whiten = FeatureMap.load(tmp_path / "a.safetensors")
    assert (found["map"], found["power"]) == (whiten.sha256, whiten.power)
    assert (tmp_path / "a.safetensors").read_bytes() == kept
    with np.load(tmp_path / "whole.npz") as one, np.load(tmp_path / "half.npz") as other:
        assert str(one["map"]) == str(other["map"]) == whiten.sha256
        assert np.array_equal(one["vectors"][:16], other["vectors"][:16])  # of the same batches
        mapped = one["vectors"]
    run("embed", NAME, whole, "--weights", weights, "--out", tmp_path / "raw.npz", "--batch-size", 8)
    with np.load(tmp_path / "raw.npz") as raw:
        assert "map" not in raw
        assert np.array_equal(whiten(torch.from_numpy(raw["vectors"])).numpy(), mapped)
        powered = run("embed", NAME, whole, *options, tmp_path / "p.parquet", "--whiten", 0.9, "--batch-size", 8)
        assert powered.exit_code == 0, powered.output
        table = pq.read_table(tmp_path / "p.parquet")
        assert table.schema.metadata[b"selfmask.map"].decode() == whiten.at(0.9).sha256
        rows = np.stack(table["vector"].to_numpy())
        assert np.array_equal(rows, whiten.at(0.9)(torch.from_numpy(raw["vectors"])).numpy())


def test_maps_that_cannot_be_used_are_refused(tmp_path: Path, mask: Path, weights: Path) -> None:
    photos = pictures(tmp_path / "photos", 9)
    options = ("--weights", weights, "--out", tmp_path / "f.npz")
    run("embed", NAME, photos, *options, "--map", tmp_path / "m")
    for words, text in (
        ((mask, photos, "--map", tmp_path / "m"), "fitted to other vectors"),
        ((NAME, photos, "--map", tmp_path / "m", "--size", 64), "fitted to other vectors"),
        ((NAME, photos, "--whiten", "auto"), "--map FILE"),
        ((mask, photos, "--whiten", "auto"), "--map FILE"),
        ((NAME, photos, "--whiten", "much"), "power"),
        ((NAME, photos, "--map", weights), "is not a map"),
    ):
        result = run("embed", *words, *options)
        assert isinstance(result.exception, SelfmaskError), result.output
        assert text in str(result.exception)


def test_evaluate_takes_a_map_for_the_vectors_it_was_fitted_to(tmp_path: Path, mask: Path, weights: Path) -> None:
    data = pictures(tmp_path / "data", 45, classes=3)
    run("embed", NAME, data, "--weights", weights, "--map", tmp_path / "m", "--out", tmp_path / "f.npz")
    options = ("evaluate", mask, "--data", data, "--weights", weights, "--protocol", "knn", "--k", 5, "--json")
    found = json.loads(run(*options, "--map", tmp_path / "m", "--whiten", 1).stdout)["results"]["knn"]
    assert list(found) == ["frozen", "frozen+map", "mask", "mask+map"]
    fitted = json.loads(run(*options, "--whiten", 1).stdout)["results"]["knn"]
    assert found["mask+map"] == fitted["mask+map"]  # the file was not fitted to these
    assert list(json.loads(run(*options, "--whiten", "none").stdout)["results"]["knn"]) == ["frozen", "mask"]
    wrong = run("evaluate", NAME, "--data", data, "--weights", weights, "--size", 64, "--map", tmp_path / "m")
    assert isinstance(wrong.exception, FeatureMapError)
    for k in ("many", "0", "5,"):
        assert isinstance(run(*options, "--k", k).exception, EvaluationError)
