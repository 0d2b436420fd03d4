"""What an earlier stage sees where: which stage that is, and what is made of its maps."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfmask.backbones import load_backbone
from selfmask.training.layout import Layout, as_maps, earlier_stage


@pytest.mark.parametrize(
    ("name", "size", "stage"),
    [
        ("resnet18", 64, "layer3"),
        ("convnext_atto", 64, "stages.2"),  # its last norm sees a pooled map
        ("tf_efficientnet_lite0", 64, "blocks.4"),  # the next block begins at the same size
        ("tf_efficientnet_lite0", 32, "blocks.2"),  # the last stage sees one place only
        ("vit_tiny_patch16_224", 224, "blocks.8"),  # of twelve
        ("convmixer_768_32", 64, "blocks.23"),  # maps of one size throughout
    ],
)
def test_the_stage_before_the_last(name: str, size: int, stage: str | None) -> None:
    model = timm.create_model(name, num_classes=0).eval()
    assert earlier_stage(model, model, torch.randn(2, 3, size, size)) == stage


def test_maps_with_channels_last_are_turned() -> None:
    maps = torch.randn(2, 5, 7, 7)
    assert torch.equal(as_maps(maps.movedim(1, 3)), maps)
    assert torch.equal(as_maps(maps), maps)


def test_tokens_are_laid_out_as_their_patches_lie() -> None:
    """Against what a backbone says its own maps are, a token for the class before them."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=64).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens = _output(model, model.blocks[8], images)
        (wanted,) = model.forward_intermediates(images, indices=[8], intermediates_only=True)
    assert tokens.shape[1] == 17
    assert torch.equal(as_maps(tokens), wanted)


@pytest.mark.parametrize("name", ["selfmask/vit", "vit_tiny_patch16_224"])
def test_transformers_have_places_too(name: str) -> None:
    model = load_backbone(name).model if "/" in name else timm.create_model(name, num_classes=0, img_size=64)
    layout = Layout(model.eval(), model)
    with torch.no_grad():
        found = layout(torch.randn(40, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    assert found.shape == (40, layout.features + 16 * 64)


def test_vectors_are_followed_by_places() -> None:
    """Against pooling by hand, and the 64 first of 128 principal directions of the first images, decomposed anew."""
    model = load_backbone("selfmask/tiny").model.eval()
    first, images = torch.randn(2, 40, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    layout = Layout(model, model)
    with torch.no_grad():
        layout(first)
        found = layout(images)
        assert torch.equal(found[:, : layout.features], model(images))
        seen, own = (_output(model, model.get_submodule("layer2"), each) for each in (first, images))
    by_place = seen.unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5)).flatten(2).transpose(1, 2).flatten(0, 1).double()
    axes = torch.linalg.svd(by_place - by_place.mean(0), full_matrices=False).Vh[:64]
    wanted = F.avg_pool2d(own.double(), 2).flatten(2).transpose(1, 2) @ axes.T
    places = found[:, layout.features :].view(40, 16, 64).double()
    # Directions are told up to their sign; similarities do not know it.
    assert torch.allclose(places.flatten(1) @ places.flatten(1).T, wanted.flatten(1) @ wanted.flatten(1).T, rtol=1e-3)


def test_nothing_is_left_on_the_network() -> None:
    model = load_backbone("selfmask/tiny").model.eval()
    layout = Layout(model, model)
    layout(torch.randn(40, 3, 32, 32))
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(RuntimeError):
        layout(torch.randn(2, 5, 32, 32))  # five colours
    assert not any(module._forward_hooks for module in model.modules())


def _output(model: nn.Module, module: nn.Module, images: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(images)
    handle.remove()
    return seen[0]
