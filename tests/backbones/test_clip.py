"""Image towers of CLIPs of open_clip and of transformers: the same vectors as in the whole model, and masks on them."""

import json
import logging
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.backbones import list_backbones, load_backbone, names
from selfmask.backbones.loading import resolve, without_weights
from selfmask.commands.opening import load_embedder
from selfmask.errors import (
    BadWeightsError,
    EmbedderError,
    MissingExtraError,
    NotABackboneError,
    SelfmaskError,
    UnknownBackboneError,
    WeightsUnavailableError,
)
from selfmask.masking.selection import select_parameters

from ..clips import (
    LAYERS,
    SIDE,
    WIDTH,
    clothes,
    open_clip_model,
    small_open_clip,
    small_transformers,
    transformers_model,
)

PAPER_VIT = MaskConfig(select="paper-vit")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clips")


@pytest.fixture(scope="module")
def small(home: Path) -> dict[str, tuple[str, Path | None]]:
    """Names and weights; a folder of transformers has its weights inside."""
    return {"open_clip": small_open_clip(home), "transformers": (small_transformers(home), None)}


@pytest.fixture
def folder(small: dict[str, tuple[str, Path | None]], tmp_path: Path) -> Path:
    """A copy of the folder that transformers wrote, to be changed."""
    return Path(shutil.copytree(small["transformers"][0].removeprefix("transformers/"), tmp_path / "clip"))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_vectors_are_those_of_the_whole_model(small: dict[str, tuple[str, Path | None]], tmp_path: Path) -> None:
    for family, whole in (("open_clip", open_clip_model(tmp_path)), ("transformers", transformers_model())):
        name, weights = small[family]
        backbone = load_backbone(name, weights=weights)
        assert (backbone.name, backbone.width, backbone.preprocessing.size) == (name, WIDTH, (SIDE, SIDE))
        assert backbone.preprocessing.interpolation == "bicubic"
        assert not any(module.training for module in backbone.model.modules())
        images = clothes(8, backbone.preprocessing)
        with torch.no_grad():
            if family == "open_clip":
                expected = whole.encode_image(images)
            else:
                expected = whole.get_image_features(pixel_values=images).pooler_output
            torch.testing.assert_close(backbone.model(images), expected, rtol=0, atol=1e-6)


OPEN_CLIP_BLOCK = {
    f"attn.{part}" for part in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
} | {f"mlp.{layer}.{part}" for layer in ("c_fc", "c_proj") for part in ("weight", "bias")}
TRANSFORMERS_BLOCK = {
    f"{layer}.{part}"
    for layer in (*(f"self_attn.{which}_proj" for which in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2")
    for part in ("weight", "bias")
}


@pytest.mark.parametrize(
    ("name", "blocks", "block"),
    [
        ("open_clip/ViT-B-32:openai", "transformer.resblocks", OPEN_CLIP_BLOCK),
        ("transformers/openai/clip-vit-base-patch32", "vision_model.encoder.layers", TRANSFORMERS_BLOCK),
    ],
)
def test_the_paper_masks_attention_and_mlps_of_vit_b32(name: str, blocks: str, block: set[str]) -> None:
    tower = without_weights(resolve(name))
    assert get_masked_model(tower, PAPER_VIT).num_masked == 85_017_600
    with_projection = MaskConfig(select="reference-vit")
    assert get_masked_model(tower, with_projection).num_masked == 85_017_600 + 393_216
    assert set(select_parameters(tower, PAPER_VIT)) == {f"{blocks}.{i}.{part}" for i in range(12) for part in block}


@pytest.mark.parametrize("family", ["open_clip", "transformers"])
def test_a_mask_is_learned_saved_and_found_again(
    small: dict[str, tuple[str, Path | None]], family: str, tmp_path: Path
) -> None:
    name, weights = small[family]
    backbone = load_backbone(name, weights=weights)
    masked = get_masked_model(backbone.model, PAPER_VIT)
    images = clothes(8, backbone.preprocessing)
    before = masked.eval()(images).detach()
    optimizer = torch.optim.SGD(masked.parameters(), lr=1000.0)
    masked.train()(images).square().sum().backward()
    scores = [parameter for parameter in masked.parameters() if parameter.requires_grad]
    assert len(scores) == LAYERS * {"open_clip": 8, "transformers": 12}[family]
    # A bias added to all keys alike changes no attention, so its gradient may be nothing but rounding.
    assert sum(bool(score.grad is not None and score.grad.abs().max() > 0) for score in scores) >= len(scores) - LAYERS
    optimizer.step()
    with torch.no_grad():
        after = masked.eval()(images)
    assert not torch.allclose(before, after, atol=1e-3)

    masked.save_pretrained(tmp_path / "mask.smn")
    again = MaskedModel.from_pretrained(load_backbone(name, weights=weights).model, tmp_path / "mask.smn").eval()
    with torch.no_grad():
        assert torch.equal(again(images), after)
        # The file names its backbone, which is not followed unless someone says so: other files say what it is.
        with pytest.raises(EmbedderError, match="if you trust it, name it yourself: --backbone"):
            load_embedder(tmp_path / "mask.smn", weights=weights)
        asked: list[str] = []
        load_embedder(tmp_path / "mask.smn", weights=weights, may_use=lambda name: not asked.append(name))
        assert asked == [name]
        embedder = load_embedder(tmp_path / "mask.smn", backbone=name, weights=weights)
        torch.testing.assert_close(embedder.model.cpu()(images), after)
    assert (embedder.width, embedder.preprocessing) == (WIDTH, backbone.preprocessing)
    assert load_embedder(name, weights=weights).width == WIDTH


def test_files_of_weights_for_a_folder(folder: Path, tmp_path: Path) -> None:
    """A checkpoint as old releases wrote it, in the folder or beside it; and one that is of another network."""
    name = f"transformers/{folder}"
    expected = load_backbone(name).model.state_dict()
    tensors = load_file(folder / "model.safetensors")
    old = tensors | {f"{tower}_model.embeddings.position_ids": torch.arange(17)[None] for tower in ("vision", "text")}
    torch.save(old, tmp_path / "other.bin")
    (folder / "model.safetensors").unlink()
    torch.save(old, folder / "pytorch_model.bin")
    for weights in (None, tmp_path / "other.bin"):
        found = load_backbone(name, weights=weights).model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    del tensors["visual_projection.weight"]
    save_file(tensors, tmp_path / "part.safetensors")
    with pytest.raises(BadWeightsError, match=r"visual_projection\.weight"):
        load_backbone(name, weights=tmp_path / "part.safetensors")


def test_a_folder_says_how_images_are_prepared(folder: Path) -> None:
    name, file = f"transformers/{folder}", folder / "preprocessor_config.json"
    usual = resolve(name).preprocessing
    change(file, resample=2, image_mean=[0.5] * 3, image_std=[0.25] * 3, crop_size=999)
    preprocessing = resolve(name).preprocessing
    assert (preprocessing.mean, preprocessing.std, preprocessing.interpolation) == ((0.5,) * 3, (0.25,) * 3, "bilinear")
    assert preprocessing.size == (SIDE, SIDE)  # the tower takes no other
    inner = json.loads(file.read_text())
    file.unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": inner}))  # as newer releases write it
    assert resolve(name).preprocessing == preprocessing
    (folder / "processor_config.json").unlink()
    assert resolve(name).preprocessing == usual
    for bad in ({"resample": 99}, {"image_mean": 3}, {"image_std": [1.0]}):
        file.write_text(json.dumps(bad))
        with pytest.raises(BadWeightsError, match=r"the preprocessing of .* cannot be read"):
            resolve(name)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (None, WeightsUnavailableError),
        ("{", BadWeightsError),
        ("[]", BadWeightsError),
        ('{"model_type": "siglip"}', NotABackboneError),
        ('{"model_type": "clip", "vision_config": {"hidden_size": "many"}}', BadWeightsError),
        ('{"model_type": "clip", "vision_config": {"image_size": [1, 2, 3]}}', BadWeightsError),
    ],
)
def test_a_folder_that_is_no_clip_is_refused(tmp_path: Path, config: str | None, error: type[SelfmaskError]) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(error, match=str(tmp_path)):
        load_backbone(f"transformers/{tmp_path}")


def test_a_folder_without_weights_says_what_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsUnavailableError, match=r"model\.safetensors(.|\n)*save_pretrained"):
        load_backbone(f"transformers/{folder}")


@pytest.mark.parametrize(
    "name", ["transformers/", "transformers//no/such/folder", "transformers/clip", "transformers/a/../b"]
)
def test_a_name_that_is_no_folder_and_no_repository(name: str) -> None:
    with pytest.raises(UnknownBackboneError, match="no such folder"):
        load_backbone(name)


def test_an_existing_folder_goes_before_a_repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    (folder.parent / "openai").mkdir()
    folder.rename("openai/clip-vit-base-patch32")
    assert load_backbone("transformers/openai/clip-vit-base-patch32").width == WIDTH


@pytest.mark.usefixtures("no_network")
def test_repositories_in_the_cache_need_no_network(folder: Path, hub_cache: Path) -> None:
    place = hub_cache / "models--someone--small-clip"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("1" * 40)
    shutil.copytree(folder, place / "snapshots" / ("1" * 40))
    backbone = load_backbone("transformers/someone/small-clip")
    expected = load_backbone(f"transformers/{folder}").model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in backbone.model.state_dict().items())
    assert "someone/small-clip" in backbone.note


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("repository", ["openai/clip-vit-base-patch16", "someone/unheard-of"])
def test_a_repository_out_of_reach_says_how_to_bring_it(repository: str) -> None:
    with pytest.raises(WeightsUnavailableError, match=rf"hf download {repository}(.|\n)*transformers/FOLDER"):
        load_backbone(f"transformers/{repository}")


def test_well_known_ones_are_listed_without_asking_the_hub() -> None:
    assert "transformers/laion/CLIP-ViT-B-32-laion2B-s34B-b79K" in names("transformers/")
    (info,) = list_backbones("transformers/openai/*large-patch14")
    # ViT-L/14 of OpenAI: as open_clip counts it
    tower = without_weights(resolve("open_clip/ViT-L-14:openai"))
    assert info.parameters == sum(parameter.numel() for parameter in tower.parameters())
    assert (info.width, info.size, info.local) == (768, (224, 224), False)
    assert re.search("openai/clip-vit-large-patch14/resolve/[0-9a-f]{40}/model.safetensors$", info.source)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("openai/clip-vit-base-patch16", "ViT-B-16:openai"),
        ("openai/clip-vit-large-patch14-336", "ViT-L-14-336:openai"),
        ("laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "ViT-B-32:laion2b_s34b_b79k"),
        ("laion/CLIP-ViT-B-16-laion2B-s34B-b88K", "ViT-B-16:laion2b_s34b_b88k"),
        ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "ViT-H-14:laion2b_s32b_b79k"),
    ],
)
def test_what_is_well_known_agrees_with_open_clip(ours: str, theirs: str) -> None:
    """The same published networks: shapes, preparation and activation."""
    recipes = resolve(f"transformers/{ours}"), resolve(f"open_clip/{theirs}")
    assert recipes[0].preprocessing == recipes[1].preprocessing
    towers = [without_weights(recipe) for recipe in recipes]
    counts = [sum(parameter.numel() for parameter in tower.parameters()) for tower in towers]
    assert counts[0] == counts[1]
    quick = [any("QuickGELU" in type(module).__name__ for module in tower.modules()) for tower in towers]
    assert quick[0] == quick[1] == ours.startswith("openai")


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=r"selfmask\[clip\]"):
        load_backbone("transformers/openai/clip-vit-base-patch32")


def test_building_a_tower_says_nothing_of_random_weights(
    small: dict[str, tuple[str, Path | None]], caplog: pytest.LogCaptureFixture
) -> None:
    name, weights = small["open_clip"]
    with caplog.at_level(logging.INFO):
        load_backbone(name, weights=weights)
    assert not [record for record in caplog.records if record.name == "root"]
