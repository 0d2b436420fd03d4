"""Tensors that make up one layer, whatever their library calls them."""

from __future__ import annotations

import pytest
import timm

from selfmask import MaskConfig, get_masked_model
from selfmask.masking.layers import layers_of


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
