"""Each method trains what it says and nothing else, and its file brings it all back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from selfmask import MaskConfig, MaskedModel, train
from selfmask.embedding.vectors import embed
from selfmask.errors import BadWeightsError, ConfigError, WrongBaseError
from selfmask.objectives.heads import head_of
from selfmask.training.methods import biases_and_norms, lora_targets, prepare
from selfmask.training.tuned import load_tuned, open_tuned
from tests.training.small import HOW, network

from ..commands.labelled import clothes, config

METHODS = ("mask", "full", "linear", "lora", "bitfit")
OTHERS = METHODS[1:]


def biased() -> nn.Module:
    """The network of the other tests, with some biases."""
    torch.manual_seed(3)
    model = network()
    return nn.Sequential(model, nn.Linear(16, 12), nn.LayerNorm(12))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_changes_what_it_says(tmp_path: Path, method: str) -> None:
    model = biased()
    before = copy.deepcopy(model.state_dict())
    images, test = clothes()
    train(model, images, config(method=method), test=test, out=tmp_path / "run", preprocessing=HOW)
    after = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items()}
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    statistics = {"0.1.running_mean", "0.1.running_var", "0.1.num_batches_tracked"}
    weights = {name for name, _ in biased().named_parameters()}
    assert (
        changed
        == {
            "mask": set(),
            "linear": set(),
            "lora": statistics,
            "full": weights | statistics,
            "bitfit": {"0.1.weight", "0.1.bias", "1.bias", "2.weight", "2.bias"} | statistics,
        }[method]
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_file_brings_back_the_model_and_its_head(tmp_path: Path, method: str) -> None:
    images, test = clothes()
    result = train(biased(), images, config(method=method), test=test, out=tmp_path / "run", preprocessing=HOW)
    if method == "mask":
        model: nn.Module = MaskedModel.from_pretrained(biased(), tmp_path / "run" / "mask.smn").eval()
        assert isinstance(model, MaskedModel)
        head = head_of(model.pack().head)
        file = tmp_path / "run" / "mask.smn"
    else:
        file = tmp_path / "run" / "tuned.safetensors"
        model, head = load_tuned(biased(), file)
        assert open_tuned(file).about.method == method
    assert result.result["bytes"] == file.stat().st_size
    vectors, _ = embed(model, test, HOW)
    expected, _ = embed(result.model, test, HOW)
    assert torch.equal(vectors, expected)
    assert test.labels is not None
    right = (head.ranked(vectors)[:, 0] == torch.tensor(test.labels)).double().mean()
    assert float(right) == result.result["accuracy"]


def test_a_file_of_another_backbone_is_refused(tmp_path: Path) -> None:
    images, test = clothes()
    train(biased(), images, config(method="bitfit"), test=test, out=tmp_path / "run", preprocessing=HOW)
    other = biased()
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    with pytest.raises(WrongBaseError, match="another backbone"):
        load_tuned(other, tmp_path / "run" / "tuned.safetensors")


@pytest.mark.parametrize("content", [b"", b"no safetensors at all", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BadWeightsError):
        load_tuned(biased(), tmp_path / "file")
    with pytest.raises(BadWeightsError):
        open_tuned(tmp_path / "missing")


def test_bitfit_is_biases_and_norms() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    names = biases_and_norms(vit)
    assert "blocks.0.norm1.weight" in names
    assert "blocks.0.attn.qkv.bias" in names
    assert not {"blocks.0.attn.qkv.weight", "pos_embed", "cls_token", "patch_embed.proj.weight"} & set(names)
    with pytest.raises(ConfigError, match="neither biases nor norm"):
        prepare(nn.Sequential(nn.Linear(3, 3, bias=False)), "bitfit", MaskConfig())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * 16 * 16, 24)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.proj(images.flatten(1))[:, None]
        output: torch.Tensor = self.attention(tokens, tokens, tokens)[0][:, 0]
        return output


@pytest.mark.parametrize("model", ["resnet18", "tf_efficientnet_lite0", "vit_tiny_patch16_224", "attention"])
def test_lora_stands_beside_what_a_mask_would_select(model: str) -> None:
    torch.manual_seed(0)
    made: Any = Attention() if model == "attention" else timm.create_model(model, num_classes=0)
    side = 16 if model == "attention" else 224
    targets = lora_targets(made, MaskConfig(), 8)
    assert targets
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        before = made.eval()(images)
    learner = prepare(made, "lora", MaskConfig())
    names = {name for name, p in made.named_parameters() if p.requires_grad}
    assert names
    assert all("lora_" in name for name in names)
    with torch.no_grad():
        torch.testing.assert_close(made.eval()(images), before, rtol=1e-4, atol=1e-4)  # they begin as nothing
    (made(images) * torch.randn(2, 1)).square().sum().backward()  # a plain sum of what a layer norm gives is constant
    assert any(p.grad is not None and bool(p.grad.abs().sum()) for p in learner.parameters)


def test_the_selection_of_the_mask_decides_for_lora() -> None:
    model = biased()
    assert lora_targets(model, MaskConfig(select=("1.weight",)), 8) == ("1",)
