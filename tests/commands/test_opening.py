"""What a user names is opened once, and nothing of it is hashed twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from selfmask import Cascade, MaskConfig, MaskedModel, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.cascade.combination import COMBINATIONS, Combination
from selfmask.cascade.config import ShapeConfig
from selfmask.cascade.model import DISPATCHER, expert_name
from selfmask.cascade.router import Router
from selfmask.commands.opening import load_embedder
from selfmask.data import open_images
from selfmask.embedding import features
from selfmask.embedding.embedder import Embedder
from selfmask.embedding.features import write_features
from selfmask.errors import BadWeightsError, CorruptMaskFileError, NotAMaskFileError
from selfmask.evaluation.moments import Moments
from selfmask.maskfile import fingerprint

from ..cli.inside import selfmask
from ..embedding.samples import pictures, weights_file
from ..maskfile.test_opening import Counted

NAME, EXPERTS = "selfmask/tiny", 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mask and a cascade on the same backbone, whose weights are in a file beside them."""
    folder = tmp_path_factory.mktemp("opening")
    weights = weights_file(folder)
    masks = []
    for seed in range(1 + EXPERTS):
        config = MaskConfig(rule="topk", active_share=0.5, seed=seed)
        masks.append(get_masked_model(load_backbone(NAME, weights=weights).model, config).mask_bytes())
    (folder / "mask.smn").write_bytes(masks[0])
    backbone = load_backbone(NAME, weights=weights)
    masked = MaskedModel.from_pretrained(backbone.model, masks[0], name=DISPATCHER)
    for k in range(EXPERTS):
        masked.load_mask(masks[1 + k], expert_name(k))
    generator = torch.Generator().manual_seed(0)
    router = Router.fit(
        torch.randn(100, backbone.width, generator=generator), ShapeConfig(experts=EXPERTS, components=3)
    )
    moments = Moments((1 + EXPERTS) * backbone.width)
    moments.add(torch.randn(100, (1 + EXPERTS) * backbone.width, generator=generator))
    combination = Combination.fit(moments, backbone.width)
    cascade = Cascade(masked, router, dict.fromkeys(COMBINATIONS, combination), backbone.preprocessing)
    cascade.save(folder / "cascade.smn")
    pictures(folder / "photos", 5)
    return folder


@pytest.mark.parametrize(("name", "parts"), [("mask.smn", 1), ("cascade.smn", 2 + EXPERTS)])
def test_embed_opens_and_hashes_everything_once(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, parts: int
) -> None:
    """The file, each part of it that has a hash, the tensors of the base, the model and the images."""
    counted = Counted(monkeypatch)
    hashed: list[tuple[str, int]] = []
    models: list[str] = []
    identities: list[object] = []
    digest, model_hash, identity = fingerprint.tensor_digest, Embedder.fingerprint, features.digest

    def tensor_digest(name: str, tensor: Tensor) -> str:
        hashed.append((name, tensor.data_ptr()))
        return digest(name, tensor)

    def model_fingerprint(self: Embedder, variant: str) -> str:
        models.append(variant)
        return model_hash(self, variant)

    def image_identity(images: object, numbers: range) -> str:
        identities.append(images)
        return identity(images, numbers)  # type: ignore[arg-type]

    monkeypatch.setattr(fingerprint, "tensor_digest", tensor_digest)
    monkeypatch.setattr(Embedder, "fingerprint", model_fingerprint)
    monkeypatch.setattr(features, "digest", image_identity)
    embedder = load_embedder(place / name, weights=place / "tiny.safetensors")
    write_features(tmp_path / "a.npz", embedder, open_images(place / "photos"), say=lambda _: None)
    assert (counted.opens, counted.bytes) == (1, (place / name).stat().st_size)
    assert counted.hashes == parts
    assert (len(models), len(identities)) == (1, 1)
    masked = embedder.model.masked if isinstance(embedder.model, Cascade) else embedder.model
    assert isinstance(masked, MaskedModel)
    base = {(name, value.data_ptr()) for name, value in masked.base.state_dict().items()}
    assert sorted(pair for pair in hashed if pair in base) == sorted(base)


@pytest.mark.parametrize("name", ["mask.smn", "cascade.smn"])
def test_inspect_opens_a_file_once(place: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    counted = Counted(monkeypatch)
    done = selfmask("inspect", place / name)
    assert done.returncode == 0, done.stderr
    assert (counted.opens, counted.bytes) == (1, (place / name).stat().st_size)


@pytest.mark.parametrize("name", ["mask.smn", "cascade.smn"])
def test_damage_is_found_before_the_backbone_is_loaded(place: Path, tmp_path: Path, name: str) -> None:
    data = (place / name).read_bytes()
    (tmp_path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptMaskFileError, match="altered"):
        load_embedder(tmp_path / name, backbone="selfmask/none")


def test_each_kind_says_what_is_wrong_in_its_own_words(tmp_path: Path) -> None:
    for name, error in (("a.smn", NotAMaskFileError), ("a.safetensors", BadWeightsError)):
        with pytest.raises(error):
            load_embedder(tmp_path / name)
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(error):
            load_embedder(tmp_path / name)


def test_a_converted_base_is_another(place: Path) -> None:
    """Its hashes stay those that masks are made for; its vectors are others."""
    prints = []
    for dtype in (torch.float32, torch.float64):
        masked = MaskedModel.from_pretrained(
            load_backbone(NAME, weights=place / "tiny.safetensors").model, place / "mask.smn"
        )
        prints.append(Embedder("", masked.to(dtype), masked.preprocessing, 256).fingerprint("frozen"))  # type: ignore[arg-type]
    assert prints[0] != prints[1]
