"""Networks cut at a module: what their vectors are, and what is left of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.backbones.cut import cut
from selfmask.commands.opening import load_embedder
from selfmask.errors import NotABackboneError, UnknownBackboneError
from tests.cli.inside import selfmask
from tests.cli.small import fine, kept, refused
from tests.cli.test_adapt import save_clothes


def output_of(model: nn.Module, at: str, images: Tensor) -> Tensor:
    """Of a module in the middle of a whole network."""
    seen: list[Tensor] = []
    handle = model.get_submodule(at).register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.no_grad():
        model(images)
    handle.remove()
    return seen[0]


VIT = {"embed_dim": 48, "depth": 3, "num_heads": 2, "img_size": 32, "patch_size": 8, "num_classes": 0}
SWIN = {"embed_dim": 24, "depths": (1, 1), "num_heads": (1, 2), "img_size": 64, "window_size": 4, "num_classes": 0}


@pytest.mark.parametrize(
    ("make", "at", "pooled"),
    [
        (lambda: timm.create_model("resnet10t", num_classes=0), "layer2", lambda x: x.mean((2, 3))),
        (lambda: timm.create_model("vit_tiny_patch16_224", **VIT), "blocks.1", lambda x: x[:, 1:].mean(1)),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224", **SWIN), "layers.0", lambda x: x.mean((1, 2))),
        (lambda: torchvision.models.squeezenet1_1(), "features.6", lambda x: x.mean((2, 3))),
        (
            lambda: torchvision.models.VisionTransformer(64, 16, 2, 2, 24, 48),
            "encoder.layers.encoder_layer_0",
            lambda x: x[:, 1:].mean(1),
        ),
        (lambda: timm.create_model("resnet10t", num_classes=7), "fc", lambda x: x),
    ],
    ids=["maps", "tokens", "places first", "torchvision", "a class token of torchvision", "vectors"],
)
def test_vectors_are_the_pooled_output_of_the_module(make, at: str, pooled) -> None:  # type: ignore[no-untyped-def]
    side = 32 if at == "blocks.1" else 64
    images = torch.randn(3, 3, side, side)
    torch.manual_seed(0)
    whole = make().eval()
    expected = pooled(output_of(whole, at, images))
    with torch.no_grad():
        found = cut(whole, at, "it", side).eval()(images)
    assert torch.equal(found, expected)


def test_what_lies_behind_is_neither_run_nor_there() -> None:
    whole = timm.create_model("resnet10t", num_classes=10).eval()
    names = {f"model.{name}" for name in whole.state_dict() if not name.startswith(("layer3", "layer4", "fc"))}
    ran: list[str] = []
    for name in ("layer2", "layer3", "fc"):
        whole.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    model = cut(whole, "layer2", "it", 32)
    assert set(model.state_dict()) == names
    ran.clear()
    masked = get_masked_model(model, MaskConfig())
    masked.train()(torch.randn(2, 3, 32, 32)).sum().backward()
    assert ran == ["layer2"]
    assert not [name for name in masked.sparsity() if name.startswith(("model.layer3", "model.layer4", "model.fc"))]


def test_in_a_list_of_blocks_those_behind_go() -> None:
    model = cut(timm.create_model("vit_tiny_patch16_224", **VIT), "blocks.1.attn", "it", 32)
    left = {name.removeprefix("model.") for name in model.state_dict()}
    assert {"pos_embed", "cls_token", "blocks.0.mlp.fc2.weight", "blocks.1.attn.proj.weight"} <= left
    assert not [name for name in left if name.startswith(("blocks.1.mlp", "blocks.2", "norm", "head"))]


def test_a_name_that_is_unknown_or_no_use_is_refused() -> None:
    with pytest.raises(UnknownBackboneError, match=r"stages\.9[\s\S]*stages\.2"):
        load_backbone("convnext_atto#stages.9", pretrained=False)
    with pytest.raises(UnknownBackboneError, match=r"'neck'"):
        load_backbone("resnet10t#neck", pretrained=False)
    with pytest.raises(NotABackboneError, match="does not run"):
        cut(Spare(), "spare", "it", 32)


class Spare(nn.Module):
    """Has a part that it never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.body(images).mean((2, 3))
        return output


def test_a_backbone_is_cut_by_its_name() -> None:
    whole, part = (load_backbone(name, pretrained=False) for name in ("resnet10t", "resnet10t#layer2"))
    images = torch.randn(2, 3, 64, 64)
    assert part.width == 128
    with torch.no_grad():
        assert torch.equal(part.model(images), output_of(whole.model, "layer2", images).mean((2, 3)))


def test_a_mask_of_a_cut_backbone_keeps_the_cut(tmp_path: Path) -> None:
    save_clothes(tmp_path / "photos", 60)
    words = ("--steps", "2", "--batch-size", "8", "--features", "layer2", "--out", tmp_path / "run")
    fine(selfmask("adapt", tmp_path / "photos", "--backbone", "selfmask/tiny", *words))
    assert kept(tmp_path / "run")["backbone"] == "selfmask/tiny#layer2"
    embedder = load_embedder(tmp_path / "run" / "mask.smn")
    assert isinstance(embedder.model, MaskedModel)
    assert embedder.width == 128
    refused(selfmask("adapt", tmp_path / "photos", "--features", "layer2"), "--backbone")


def as_in_mobile_sam(name: str) -> str:
    """What the image encoder of MobileSAM calls a tensor of timm's TinyViT."""
    parts = name.split(".")
    if parts[0] == "stages":
        parts[:2] = ["layers", str(int(parts[1]) - (parts[2] == "downsample"))]
    if parts[0] == "patch_embed":
        parts[1] = f"seq.{ {'conv1': 0, 'conv2': 2}[parts[1]] }"
    text = ".".join(parts).replace("head.norm.", "norm_head.").replace("head.fc.", "head.")
    return "image_encoder." + text.replace(".conv.", ".c.")


def test_weights_of_mobile_sam_are_those_of_a_tiny_vit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = timm.create_model("tiny_vit_5m_224", num_classes=1000).eval()
    stored = {as_in_mobile_sam(name): value for name, value in whole.state_dict().items()}
    assert "image_encoder.layers.0.downsample.conv1.c.weight" in stored
    more = {"image_encoder.neck.0.weight": torch.ones(2), "mask_decoder.iou_token.weight": torch.ones(1, 4)}
    torch.save(stored | more, tmp_path / "mobile_sam.pt")
    part = load_backbone("tiny_vit_5m_224#stages.2", weights=tmp_path / "mobile_sam.pt")
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(part.model(images), output_of(whole, "stages.2", images).mean((2, 3)))
