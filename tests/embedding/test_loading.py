"""A run folder, a mask file and a backbone's name all give the model they stand for."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.commands.opening import load_embedder
from selfmask.data import open_images
from selfmask.embedding.vectors import embed
from selfmask.errors import EmbedderError, NotAMaskFileError, WrongBaseError
from selfmask.preprocessing import Preprocessing
from selfmask.running import best_device

from .samples import HOW, pictures, weights_file

NAME = "selfmask/tiny"
OTHER = Preprocessing((40, 40), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return weights_file(tmp_path)


def finished_run(folder: Path, weights: Path, preprocessing: Preprocessing | None = None) -> MaskedModel:
    """A run folder as `adapt` leaves it, with a random half of the weights off."""
    folder.mkdir()
    masked = get_masked_model(load_backbone(NAME, weights=weights).model, MaskConfig(rule="topk", active_share=0.5))
    masked.preprocessing = preprocessing or masked.preprocessing
    masked.save_pretrained(folder / "mask.smn")
    (folder / "config.json").write_text(json.dumps({"backbone": NAME, "weights": str(weights)}))
    return masked.eval()


def test_a_backbone_by_its_name(weights: Path) -> None:
    found = load_embedder(NAME, weights=weights)
    assert (found.name, found.width, found.model.training) == (NAME, 256, False)
    assert found.preprocessing == load_backbone(NAME, weights=weights).preprocessing
    assert not isinstance(found.model, MaskedModel)


def test_a_run_folder(tmp_path: Path, weights: Path) -> None:
    masked = finished_run(tmp_path / "run", weights, OTHER)
    found = load_embedder(tmp_path / "run")
    assert isinstance(found.model, MaskedModel)
    assert not found.model.training
    assert found.preprocessing == OTHER  # what the mask was learned with, not what the backbone was
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


def test_a_run_that_does_not_name_its_backbone(tmp_path: Path, weights: Path) -> None:
    masked = finished_run(tmp_path / "run", weights)
    config = {"backbone": None, "weights": None}
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    assert isinstance(load_embedder(tmp_path / "run", weights=weights).model, MaskedModel)  # the mask names it
    masked.base_name = None
    masked.save_pretrained(tmp_path / "run/mask.smn")
    with pytest.raises(EmbedderError, match="--backbone NAME"):
        load_embedder(tmp_path / "run", weights=weights)
    assert isinstance(load_embedder(tmp_path / "run", backbone=NAME, weights=weights).model, MaskedModel)


@pytest.mark.parametrize("config", [None, "{", "[]", '{"backbone": 5}', '{"weights": []}'])
def test_what_is_no_run_folder(tmp_path: Path, weights: Path, config: str | None) -> None:
    finished_run(tmp_path / "run", weights)
    place = tmp_path / "run/config.json"
    place.unlink() if config is None else place.write_text(config)
    with pytest.raises(EmbedderError):
        load_embedder(tmp_path / "run")


def test_what_is_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(EmbedderError, match=r"(?s)not a run folder, a mask file or a backbone.*resnet50"):
        load_embedder("resnet5O")
    with pytest.raises(EmbedderError, match="check the path"):
        load_embedder("runs/nowhere", backbone=NAME)
    with pytest.raises(NotAMaskFileError):
        load_embedder(tmp_path / "nowhere.smn")


def test_fingerprints_tell_models_apart(tmp_path: Path, weights: Path) -> None:
    finished_run(tmp_path / "run", weights)
    finished_run(tmp_path / "other", weights, OTHER)
    plain = load_embedder(NAME, weights=weights).fingerprint("frozen")
    run = load_embedder(tmp_path / "run").fingerprint("mask")
    assert run == load_embedder(tmp_path / "run/mask.smn", weights=weights).fingerprint("mask")
    assert plain == load_embedder(tmp_path / "run").fingerprint("frozen")
    assert len({plain, run, load_embedder(tmp_path / "other").fingerprint("mask")}) == 3
    moved = load_embedder(tmp_path / "run")
    assert isinstance(moved.model, MaskedModel)
    moved.model.recalibrate([torch.randn(8, 3, 32, 32)])
    assert moved.fingerprint("mask") != run


def test_models_are_where_the_fastest_device_is(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert best_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    finished_run(tmp_path / "run", weights)
    monkeypatch.setattr(
        "selfmask.embedding.loading.best_device", lambda: torch.device("meta")
    )  # a device every machine has
    for what in (NAME, tmp_path / "run", tmp_path / "run/mask.smn"):
        model = load_embedder(what, weights=weights).model
        assert {value.device.type for value in model.state_dict().values()} == {"meta"}


class Elsewhere(torch.nn.Module):
    """A model on another device, that says where the images it gets are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, device="meta"))
        self.places: set[str] = set()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.places.add(images.device.type)
        return torch.zeros(len(images), 2)


def test_images_go_where_the_model_is(tmp_path: Path) -> None:
    model = Elsewhere()
    rows, _ = embed(model, open_images(pictures(tmp_path, 3)), HOW)
    assert (rows.device.type, model.places) == ("cpu", {"meta"})


def test_a_head_that_others_made_is_no_reason_to_refuse_the_mask(tmp_path: Path, weights: Path) -> None:
    masked = get_masked_model(load_backbone(NAME, weights=weights).model)
    masked.save_pretrained(tmp_path / "a.smn", head={"fc.weight": torch.ones(2, 256)})
    assert load_embedder(tmp_path / "a.smn", weights=weights).head is None
