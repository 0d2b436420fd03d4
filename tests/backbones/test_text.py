"""Texts: the same tokens, vectors and logits as in the libraries' own models."""

import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from selfmask.backbones import load_backbone
from selfmask.backbones.text import PAPER, class_embeddings, class_prompts, text_embeddings
from selfmask.errors import (
    BadWeightsError,
    ConfigError,
    NoTextTowerError,
    UnknownBackboneError,
    WeightsUnavailableError,
)

from ..cli.test_adapt import save_clothes
from ..clips import WIDTH, clothes, open_clip_model, small_open_clip, small_transformers, transformers_model

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "clip.md"
Small = dict[str, tuple[str, Path | None]]
CLASSES = ["T-shirt/top", "ankle_boot", "grandmother's café", "東京 bag 42", "Bag"]
TEMPLATES = ("This is a photo of a {label}", "{label}, and nothing but {label}!", "a  blurry photo of the {label}.")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("clips")
    return {"open_clip": small_open_clip(folder), "transformers": (small_transformers(folder), None)}


@pytest.fixture
def folder(small: Small, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small["transformers"][0].removeprefix("transformers/"), tmp_path / "clip"))


def their_tokens(small: Small, family: str, texts: list[str]) -> Any:
    if family == "open_clip":
        return open_clip.get_tokenizer("ViT-B-32")(texts)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small["transformers"][0].removeprefix("transformers/"))
    return tokenizer(texts, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids


def test_both_tokenizers_give_the_same_tokens(small: Small) -> None:
    texts = [text for group in class_prompts(CLASSES, TEMPLATES) for text in group]
    one, other = (their_tokens(small, family, texts) for family in small)
    ends = one.argmax(1)
    assert ends.min() > 3
    for row, (a, b) in enumerate(zip(one.tolist(), other.tolist(), strict=True)):
        assert a[: ends[row] + 1] == b[: ends[row] + 1]


@pytest.mark.parametrize("family", ["open_clip", "transformers"])
def test_zero_shot_logits_are_those_of_the_library(small: Small, family: str, tmp_path: Path) -> None:
    name, weights = small[family]
    backbone = load_backbone(name, weights=weights)
    images = clothes(16, backbone.preprocessing)
    rows, scale = class_embeddings(name, CLASSES, weights=weights)
    assert rows.shape == (len(CLASSES), WIDTH)
    assert not rows.requires_grad
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(CLASSES)))
    assert scale == pytest.approx(np.exp(3.0))
    prompts = [f"This is a photo of a {label.replace('_', ' ')}" for label in CLASSES]
    tokens = their_tokens(small, family, prompts)
    with torch.no_grad():
        found = scale * F.normalize(backbone.model(images), dim=-1) @ rows.T
        if family == "open_clip":
            expected, _ = open_clip_model(tmp_path).get_logits(images, tokens)
        else:
            expected = transformers_model()(input_ids=tokens, pixel_values=images).logits_per_image
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found.std(1).min() > 0.01  # the classes do differ


@pytest.mark.parametrize("family", ["open_clip", "transformers"])
def test_a_class_is_the_mean_of_its_templates(small: Small, family: str, tmp_path: Path) -> None:
    name, weights = small[family]
    rows, _ = class_embeddings(name, CLASSES, TEMPLATES, weights=weights)
    model = open_clip_model(tmp_path) if family == "open_clip" else transformers_model()
    for row, label in zip(rows.numpy(), CLASSES, strict=True):
        tokens = their_tokens(small, family, [template.format(label=label.replace("_", " ")) for template in TEMPLATES])
        with torch.no_grad():
            if family == "open_clip":
                vectors = model.encode_text(tokens)
            else:
                vectors = model.get_text_features(input_ids=tokens).pooler_output
        total = sum(vector / np.linalg.norm(vector) for vector in vectors.double().numpy())
        np.testing.assert_allclose(row, total / np.linalg.norm(total), atol=1e-5)


def test_many_prompts_and_long_ones(small: Small) -> None:
    """More than one batch gives what each alone gives; what is too long is cut off."""
    long = "a very " * 100 + "long name"
    for name, weights in small.values():
        many = [[f"number {i}", f"figure {i}"] for i in range(150)] + [[long]]
        rows, _ = text_embeddings(name, many, weights=weights)
        alone, _ = text_embeddings(name, [many[149], [long + " and more"]], weights=weights)
        torch.testing.assert_close(rows[149:], alone)


def test_random_numbers_are_left_alone(small: Small) -> None:
    for name, weights in small.values():
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        class_embeddings(name, ["bag"], weights=weights)
        assert torch.equal(torch.rand(3), expected)


def test_prompts() -> None:
    assert PAPER == ("This is a photo of a {label}",)
    assert class_prompts(["ankle_boot", "{x} {label}"]) == [
        ["This is a photo of a ankle boot"],
        ["This is a photo of a {x} {label}"],
    ]


@pytest.mark.parametrize(
    ("classes", "templates", "match"),
    [
        (["bag"], (), "no template"),
        (["bag"], ("a photo of a {label}", "a photo of {name}"), "{name}"),
        ([], PAPER, "no name"),
        (["bag", "_"], PAPER, "no name"),
        (["ankle_boot", "bag", "ankle boot"], PAPER, r"ankle_boot.*ankle boot"),
    ],
)
def test_classes_and_templates_that_cannot_work(classes: list[str], templates: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        class_embeddings("open_clip/ViT-B-32", classes, templates)


def test_only_clips_have_a_text_tower() -> None:
    for name in ("resnet18", "selfmask/tiny", "swav/resnet50", "vit_base_patch32_clip_224.openai"):
        with pytest.raises(NoTextTowerError, match=r"open_clip/ARCH(.|\n)*transformers/OWNER/NAME"):
            class_embeddings(name, ["bag"])
    with pytest.raises(UnknownBackboneError, match="open_clip/ViT-B-32"):
        class_embeddings("open_clip/ViT-B32", ["bag"])


def test_a_file_of_the_image_tower_alone_is_refused(small: Small, tmp_path: Path) -> None:
    """Bare, as we would save it, and as it stands in the whole file."""
    bare, part = tmp_path / "bare.safetensors", tmp_path / "part.safetensors"
    for (name, weights), keys in zip(
        small.values(), (("visual.",), ("vision_model.", "visual_projection.")), strict=True
    ):
        whole = load_file(weights or Path(name.removeprefix("transformers/")) / "model.safetensors")
        save_file({key: value for key, value in whole.items() if key.startswith(keys)}, part)
        save_file(load_backbone(name, weights=part).model.state_dict(), bare)  # fine for the image tower
        for file in (bare, part):
            with pytest.raises(BadWeightsError, match=r"text tower(.|\n)*whole CLIP(.|\n)*missing"):
                class_embeddings(name, ["bag"], weights=file)
        with pytest.raises(BadWeightsError, match="no such file"):
            class_embeddings(name, ["bag"], weights=tmp_path / "none.safetensors")


def test_weights_beside_a_folder_are_read(small: Small, folder: Path, tmp_path: Path) -> None:
    name = f"transformers/{folder}"
    tensors = load_file(folder / "model.safetensors")
    tensors["logit_scale"] = torch.tensor(1.0)
    torch.save(tensors | {"text_model.embeddings.position_ids": torch.arange(77)[None]}, tmp_path / "mine.bin")
    rows, scale = class_embeddings(name, ["bag"], weights=tmp_path / "mine.bin")
    assert scale == pytest.approx(np.e)
    assert torch.equal(rows, class_embeddings(small["transformers"][0], ["bag"])[0])


def test_a_name_without_published_weights_needs_a_file(small: Small) -> None:
    with pytest.raises(WeightsUnavailableError, match="--weights"):
        class_embeddings(small["open_clip"][0], ["bag"])


def test_a_folder_without_its_tokenizer_is_refused(folder: Path) -> None:
    name = f"transformers/{folder}"
    vocabulary = (folder / "vocab.json").read_text()
    (folder / "merges.txt").unlink()
    with pytest.raises(WeightsUnavailableError, match=r"merges\.txt"):
        class_embeddings(name, ["bag"])
    (folder / "vocab.json").unlink()
    with pytest.raises(WeightsUnavailableError, match=r"tokenizer\.json"):
        class_embeddings(name, ["bag"])
    # Another end of the text than the tower was trained with: every vector would be that of the first token.
    (folder / "vocab.json").write_text(vocabulary.replace("<|endoftext|>", "<end_of_text>"))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(BadWeightsError, match="does not belong to its text tower"):
        class_embeddings(name, ["bag"])


@pytest.mark.usefixtures("no_network")
def test_repositories_in_the_cache_need_no_network(small: Small, folder: Path, hub_cache: Path) -> None:
    place = hub_cache / "models--someone--small-clip"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("1" * 40)
    shutil.copytree(folder, place / "snapshots" / ("1" * 40))
    found = class_embeddings("transformers/someone/small-clip", CLASSES)
    assert torch.equal(found[0], class_embeddings(small["transformers"][0], CLASSES)[0])


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "name", ["open_clip/ViT-B-16-SigLIP", "open_clip/roberta-ViT-B-32", "transformers/openai/clip-vit-base-patch32"]
)
def test_tokenizers_out_of_reach_are_an_error_at_once(name: str, small: Small) -> None:
    start = time.perf_counter()
    with pytest.raises(WeightsUnavailableError, match="refused"):
        class_embeddings(name, ["bag"], weights=small["open_clip"][1])
    assert time.perf_counter() - start < 5


def test_the_documentation_runs(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small CLIP, and on pictures of clothes in `photos`."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    save_clothes(tmp_path / "photos", 10)
    found: dict[str, Any] = {}
    exec(code.replace("open_clip/ViT-B-32:openai", small["transformers"][0]), found)
    assert found["probabilities"].shape[1] == 3
    torch.testing.assert_close(found["probabilities"].sum(1), torch.ones(len(found["probabilities"])))
