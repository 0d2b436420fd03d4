"""A run folder, a mask file and a backbone's name all give the model they stand for."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.errors import EmbedderError, NotAMaskFileError, WrongBaseError
from selfmask.loading import load_embedder

from .samples import weights_file

NAME = "selfmask/tiny"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return weights_file(tmp_path)


def finished_run(folder: Path, weights: Path, **config: object) -> MaskedModel:
    """A run folder as `adapt` leaves it, with a random half of the weights off."""
    folder.mkdir()
    masked = get_masked_model(load_backbone(NAME, weights=weights).model, MaskConfig(rule="topk", active_share=0.5))
    masked.save_pretrained(folder / "mask.smn")
    words = {"backbone": NAME, "weights": str(weights), "size": None} | config
    (folder / "config.json").write_text(json.dumps(words))
    return masked.eval()


def test_a_backbone_by_its_name(weights: Path) -> None:
    found = load_embedder(NAME, weights=weights)
    assert (found.name, found.width, found.model.training) == (NAME, 256, False)
    assert found.preprocessing == load_backbone(NAME, weights=weights).preprocessing
    assert not isinstance(found.model, MaskedModel)


def test_a_run_folder(tmp_path: Path, weights: Path) -> None:
    masked = finished_run(tmp_path / "run", weights, size=40)
    found = load_embedder(tmp_path / "run")
    assert isinstance(found.model, MaskedModel)
    assert not found.model.training
    assert found.preprocessing.size == (40, 40)
    images = torch.randn(3, 3, 40, 40)
    with torch.no_grad():
        assert torch.equal(found.model(images), masked(images))
    assert found.width == 256


def test_a_mask_file(tmp_path: Path, weights: Path) -> None:
    masked = finished_run(tmp_path / "run", weights)
    found = load_embedder(str(tmp_path / "run/mask.smn"), weights=weights)
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(found.model(images), masked(images))
    assert found.preprocessing == masked.preprocessing


def test_the_preprocessing_in_a_mask_file_counts(tmp_path: Path, weights: Path) -> None:
    masked = finished_run(tmp_path / "run", weights)
    assert masked.preprocessing is not None
    masked.preprocessing = dataclasses.replace(masked.preprocessing, size=(48, 48))
    masked.save_pretrained(tmp_path / "a.smn")
    assert load_embedder(tmp_path / "a.smn", weights=weights).preprocessing.size == (48, 48)


def test_a_mask_without_a_name_needs_one(tmp_path: Path, weights: Path) -> None:
    masked = finished_run(tmp_path / "run", weights)
    masked.base_name, masked.preprocessing = None, None
    masked.save_pretrained(tmp_path / "a.smn")
    with pytest.raises(EmbedderError, match="--backbone NAME"):
        load_embedder(tmp_path / "a.smn", weights=weights)
    found = load_embedder(tmp_path / "a.smn", backbone=NAME, weights=weights)
    assert found.preprocessing == load_backbone(NAME, weights=weights).preprocessing


def test_a_name_that_cannot_be_loaded(tmp_path: Path, weights: Path) -> None:
    masked = finished_run(tmp_path / "run", weights)
    masked.base_name = "my/own-network"
    masked.save_pretrained(tmp_path / "a.smn")
    with pytest.raises(EmbedderError, match=r"(?s)my/own-network.*--backbone NAME, with --weights FILE"):
        load_embedder(tmp_path / "a.smn")


def test_other_weights_are_refused(tmp_path: Path, weights: Path) -> None:
    finished_run(tmp_path / "run", weights)
    other = load_backbone(NAME, weights=weights).model
    torch.nn.init.normal_(other.layer1[0].conv1.weight)
    torch.save(other.state_dict(), tmp_path / "other.pt")
    with pytest.raises(WrongBaseError):
        load_embedder(tmp_path / "run", weights=tmp_path / "other.pt")


def test_a_run_that_is_not_finished(tmp_path: Path, weights: Path) -> None:
    finished_run(tmp_path / "run", weights)
    (tmp_path / "run/mask.smn").unlink()
    with pytest.raises(EmbedderError, match=r"(?s)not finished.*--resume"):
        load_embedder(tmp_path / "run")


@pytest.mark.parametrize("config", [None, "{", "[]", "{}"])
def test_what_is_no_run_folder(tmp_path: Path, weights: Path, config: str | None) -> None:
    finished_run(tmp_path / "run", weights)
    place = tmp_path / "run/config.json"
    place.unlink() if config is None else place.write_text(config)
    with pytest.raises(EmbedderError):
        load_embedder(tmp_path / "run")


def test_what_is_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(EmbedderError, match=r"(?s)no run folder, no mask file and no backbone.*resnet50"):
        load_embedder("resnet5O")
    with pytest.raises(EmbedderError, match="check the path"):
        load_embedder("runs/nowhere", backbone=NAME)
    with pytest.raises(NotAMaskFileError):
        load_embedder(tmp_path / "nowhere.smn")


def test_fingerprints_tell_models_apart(tmp_path: Path, weights: Path) -> None:
    finished_run(tmp_path / "run", weights)
    finished_run(tmp_path / "larger", weights, size=40)
    plain = load_embedder(NAME, weights=weights).fingerprint
    run = load_embedder(tmp_path / "run").fingerprint
    assert run == load_embedder(tmp_path / "run/mask.smn", weights=weights).fingerprint
    assert len({plain, run, load_embedder(tmp_path / "larger").fingerprint}) == 3
    moved = load_embedder(tmp_path / "run")
    assert isinstance(moved.model, MaskedModel)
    moved.model.recalibrate([torch.randn(8, 3, 32, 32)])
    assert moved.fingerprint != run
