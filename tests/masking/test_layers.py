"""Tensors that make up one layer, and projections that make up one tensor, whatever their library calls them."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.masking.layers import layers_of, projections_in

from .architectures import named_scores


@pytest.mark.parametrize(
    "parts",
    [
        ("q_proj", "k_proj", "v_proj"),  # CLIP
        ("query", "key", "value"),  # BERT and its kin
        ("to_q", "to_k", "to_v"),
        ("wq", "wk", "wv"),
        ("q", "kv"),  # PVT
    ],
)
def test_queries_keys_and_values_are_one_layer(parts: tuple[str, ...]) -> None:
    names = [f"blocks.{block}.attn.{part}.{kind}" for block in (0, 1) for part in parts for kind in ("weight", "bias")]
    found = layers_of(["stem.weight", *names, "blocks.0.attn.proj.weight"])
    assert sorted(map(len, found)) == [1, 1] + 4 * [len(parts)]
    assert [f"blocks.0.attn.{part}.weight" for part in parts] in found


def test_those_of_torch_are_too() -> None:
    names = [f"attn.{part}_proj_weight" for part in "qkv"]
    assert layers_of([*names, "attn.in_proj_bias"]) == [names, ["attn.in_proj_bias"]]


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "tf_efficientnet_lite0", "vit_tiny_patch16_224"])
def test_elsewhere_every_tensor_is_a_layer(name: str) -> None:
    """Convolutional networks, and attention in one tensor, learn as they always did."""
    masked = get_masked_model(timm.create_model(name, num_classes=0), MaskConfig())
    assert [len(layer) for layer in masked.layers()] == len(masked.scores) * [1]


@pytest.mark.parametrize(
    ("name", "rows", "count"),
    [
        ("blocks.0.attn.qkv.weight", 12, 3),
        ("blocks.0.attn.qkv.bias", 12, 3),
        ("attn.in_proj_weight", 12, 3),
        ("attn.in_proj_bias", 12, 3),
        ("attn.kv.weight", 8, 2),
        ("attn.q_proj.weight", 12, 1),
        ("attn.proj.weight", 12, 1),
        ("attn.qkv.weight", 13, 1),  # no three equal parts
    ],
)
def test_projections_that_one_tensor_holds(name: str, rows: int, count: int) -> None:
    assert projections_in(name, rows) == count


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(5, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.qkv(x)


class Apart(nn.Module):
    """The same numbers in three tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(5, 4) for name in ("q", "k", "v")})
        fused = Fused().qkv
        with torch.no_grad():
            for part, weight, bias in zip(self.parts.values(), fused.weight.chunk(3), fused.bias.chunk(3), strict=True):
                part.weight.copy_(weight)
                part.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts.values()], 1)


@pytest.mark.parametrize("detach_alpha", [False, True])
def test_fused_projections_are_masked_as_if_they_were_apart(detach_alpha: bool, tmp_path: Path) -> None:
    """Outputs and gradients, also where all weights of one projection are off, and from a file."""
    config = MaskConfig(alpha_of="projection", detach_alpha=detach_alpha)
    fused, apart = get_masked_model(Fused(), config), get_masked_model(Apart(), config)
    scores = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    scores[4:8] = -1
    with torch.no_grad():
        named_scores(fused)["qkv.weight"].copy_(scores)
        for name, part in zip("qkv", scores.chunk(3), strict=True):
            named_scores(apart)[f"parts.{name}.weight"].copy_(part)
    x = torch.randn(7, 5)
    outputs = fused(x), apart(x)
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)
    for output in outputs:
        output.sin().sum().backward()
    expected = torch.cat([named_scores(apart)[f"parts.{name}.weight"].grad for name in "qkv"])
    torch.testing.assert_close(named_scores(fused)["qkv.weight"].grad, expected, rtol=1e-5, atol=1e-6)
    fused.save_pretrained(tmp_path / "fused.smn")
    loaded = MaskedModel.from_pretrained(Fused(), tmp_path / "fused.smn")
    assert torch.equal(loaded(x), outputs[0])
    whole = get_masked_model(Fused(), MaskConfig(detach_alpha=detach_alpha))
    with torch.no_grad():
        named_scores(whole)["qkv.weight"].copy_(scores)
    assert not torch.allclose(whole(x), outputs[0])  # one alpha for all is something else
