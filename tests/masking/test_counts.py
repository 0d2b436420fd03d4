"""How many weights are masked: the numbers of the paper, to the last one."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from selfmask import AdaptConfig, MaskConfig, TrainConfig, get_masked_model
from selfmask.masking.selection import select_parameters

TRAIN = TrainConfig.preset("paper")


def count(model: nn.Module, select: str) -> int:
    return get_masked_model(model, MaskConfig(select=select)).num_masked


def on_meta(name: str) -> nn.Module:
    """Shapes without memory: counting needs no numbers."""
    with torch.device("meta"):
        return timm.create_model(name)


@pytest.mark.parametrize(("name", "expected"), [("resnet50", 23_462_592), ("resnet18", 11_168_704)])
def test_resnets_of_the_paper(name: str, expected: int) -> None:
    assert count(on_meta(name), "paper-resnet") == expected


@pytest.mark.parametrize("preset", [AdaptConfig.preset("paper"), AdaptConfig.preset("reference"), TRAIN])
@pytest.mark.parametrize(("name", "expected"), [("resnet50", 23_462_592), ("resnet18", 11_168_704)])
def test_presets_named_after_the_paper_mask_what_it_masks(
    preset: AdaptConfig | TrainConfig, name: str, expected: int
) -> None:
    assert get_masked_model(on_meta(name), preset.mask).num_masked == expected


def test_paper_is_for_any_network() -> None:
    small = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=0)
    assert count(small, "paper") == count(small, "paper-vit")
    with torch.device("meta"):
        unnumbered = torchvision.models.vit_b_16()  # its blocks bear names in which we find no stages
    for other in (timm.create_model("mobilenetv3_small_050", num_classes=0), unnumbered):
        assert count(other, "paper") == count(other, "auto")


@pytest.mark.parametrize(
    ("stages", "expected"), [("1-1", 213_504), ("1-2", 1_426_944), ("1-3", 8_506_880), ("0-4", 23_462_592)]
)
def test_cumulated_stages_of_resnet50(stages: str, expected: int) -> None:
    assert count(on_meta("resnet50"), f"stages:{stages}") == expected


def test_the_stem_is_stage_zero() -> None:
    model = on_meta("resnet50")
    stem = 64 * 3 * 7 * 7
    assert count(model, "stages:0-0") == stem
    assert count(model, "stages:1-4") == 23_462_592 - stem


@pytest.mark.parametrize(
    ("name", "early", "first"),
    [
        ("resnet18", ("conv1.", "layer1."), "layer2.0.conv1.weight"),
        ("resnet50", ("conv1.", "layer1.", "layer2.0.conv1.", "layer2.0.conv2."), "layer2.0.conv3.weight"),
        ("vit_tiny_patch16_224", ("blocks.0.", "blocks.1.", "blocks.2."), "blocks.3.attn.qkv.weight"),
    ],
)
def test_late_is_all_but_the_first_quarter_of_the_layers(name: str, early: tuple[str, ...], first: str) -> None:
    model = on_meta(name)
    auto, late = (select_parameters(model, MaskConfig(select=select)) for select in ("auto", "late"))
    assert late == [each for each in auto if not each.startswith(early)]
    assert late[0] == first
    assert select_parameters(model, AdaptConfig.preset("fast").mask) == late


def test_a_backward_pass_ends_where_nothing_is_masked() -> None:
    masked = get_masked_model(timm.create_model("resnet18", num_classes=0), MaskConfig(select="late"))
    seen = dict[str, bool]()
    for name, module in masked.base.named_modules():
        if name in ("layer1", "layer2"):
            module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output.requires_grad}))
    masked(torch.ones(2, 3, 32, 32))
    assert seen == {"layer1": False, "layer2": True}


def test_counting_on_meta_is_counting_for_real() -> None:
    assert count(timm.create_model("resnet18"), "paper-resnet") == 11_168_704


def test_clip_vit_b32_of_open_clip() -> None:
    transformer = pytest.importorskip("open_clip.transformer")
    with torch.device("meta"):
        tower = transformer.VisionTransformer(
            image_size=224, patch_size=32, width=768, layers=12, heads=12, mlp_ratio=4, output_dim=512
        )
    assert count(tower, "paper-vit") == count(tower, "paper") == 85_017_600


@pytest.mark.parametrize("kind", ["CLIPVisionModel", "CLIPVisionModelWithProjection"])
def test_clip_vit_b32_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPVisionConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        image_size=224,
        patch_size=32,
    )
    with torch.device("meta"):
        tower = getattr(transformers, kind)(config)
    # the visual projection is not in a block, and the paper's text leaves it out
    assert count(tower, "paper-vit") == count(tower, "paper") == 85_017_600
