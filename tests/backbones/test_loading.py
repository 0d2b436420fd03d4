"""Names of every family, and the network behind each."""

import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_sample_image

from selfmask import get_masked_model
from selfmask.backbones import Backbone, load_backbone
from selfmask.errors import MissingExtraError, UnknownBackboneError


def prepared(backbone: Backbone, photo: str) -> torch.Tensor:
    """A real photograph as the backbone wants it."""
    preprocessing = backbone.preprocessing
    image = Image.fromarray(load_sample_image(photo)).resize(preprocessing.size[::-1], Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    return (
        (pixels - torch.tensor(preprocessing.mean)[:, None, None]) / torch.tensor(preprocessing.std)[:, None, None]
    )[None]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("resnt50", "resnet50"),
        ("ResNet50", "resnet50"),
        ("resnet18.a1_in1", "resnet18.a1_in1k"),
        ("vit_base_patch16_224_dino", "vit_base_patch16_224.dino"),
        ("swav/resnet18", "swav/resnet50"),
        ("selfmask/tny", "selfmask/tiny"),
        ("open_clip/ViT-B32", "open_clip/ViT-B-32"),
        ("open_clip/ViT-B-32:openia", "open_clip/ViT-B-32:openai"),
    ],
)
def test_a_typo_is_answered_with_the_closest_names(name: str, meant: str) -> None:
    with pytest.raises(UnknownBackboneError) as caught:
        load_backbone(name)
    assert meant in str(caught.value.expected).removeprefix("a name such as ").split(", ")


def test_a_name_like_nothing_is_answered_too() -> None:
    for name in ("", "/", "timm/", "open_clip/", "qqqqqqqqqq"):
        with pytest.raises(UnknownBackboneError, match="selfmask backbones"):
            load_backbone(name)


@pytest.mark.parametrize(
    ("name", "width"), [("resnet10t", 512), ("vit_tiny_patch16_224", 192), ("mobilenetv3_small_050", 1024)]
)
def test_timm_networks_give_vectors_and_know_their_preparation(name: str, width: int) -> None:
    backbone = load_backbone(name, pretrained=False)
    with torch.no_grad():
        vectors = backbone.model(prepared(backbone, "china.jpg"))
    assert vectors.shape == (1, backbone.width) == (1, width)
    assert {p.dtype for p in backbone.model.parameters()} == {torch.float32}
    assert not any(module.training for module in backbone.model.modules())
    config = timm.get_pretrained_cfg(name)
    assert backbone.preprocessing.size == config.input_size[1:]
    assert (backbone.preprocessing.mean, backbone.preprocessing.std) == (config.mean, config.std)
    masked = get_masked_model(backbone.model)
    assert (masked.base_name, masked.preprocessing) == (name, backbone.preprocessing)


def test_transformers_take_crops_of_other_sizes_and_stay_the_same_at_their_own() -> None:
    backbone = load_backbone("vit_tiny_patch16_224", pretrained=False)
    plain = timm.create_model("vit_tiny_patch16_224", num_classes=0).eval()
    plain.load_state_dict(backbone.model.state_dict())
    image = prepared(backbone, "flower.jpg")
    with torch.no_grad():
        assert torch.equal(backbone.model(image), plain(image))
        assert backbone.model(image[..., :96, :96]).shape == (1, 192)


def test_imagenet_weights_from_a_package_need_no_network() -> None:
    """The pictures are of a temple in China and of a dahlia: the classifier, which we drop, says so."""
    backbone = load_backbone("tf_efficientnet_lite0.in1k")
    assert backbone.preprocessing.mean == (127 / 255,) * 3
    assert backbone.preprocessing.std == (128 / 255,) * 3
    stored = torch.load(backbone.note.removeprefix("weights from "), weights_only=True)
    with torch.no_grad():
        palace, bloom = (
            (stored["_fc.weight"] @ backbone.model(prepared(backbone, photo))[0] + stored["_fc.bias"]).topk(5).indices
            for photo in ("china.jpg", "flower.jpg")
        )
    assert {698, 832, 538, 663} & set(palace.tolist())  # palace, stupa, dome, monastery
    assert {985, 986, 308, 309, 310, 723, 738, 883} & set(bloom.tolist())  # flowers, what sits on them, and vases
    without_tag = load_backbone("tf_efficientnet_lite0")
    assert all(
        torch.equal(a, b) for a, b in zip(without_tag.model.parameters(), backbone.model.parameters(), strict=True)
    )


def test_open_clip_image_towers_load_from_files_of_the_whole_model(tmp_path: object) -> None:
    import open_clip

    torch.manual_seed(2)
    whole = open_clip.create_model("ViT-S-32-alt", force_quick_gelu=False).eval()
    path = tmp_path / "open_clip_model.safetensors"  # type: ignore[operator]
    save_file(whole.state_dict(), path)
    backbone = load_backbone("open_clip/ViT-S-32-alt", weights=path)
    image = prepared(backbone, "china.jpg")
    with torch.no_grad():
        assert torch.equal(backbone.model(image), whole.encode_image(image))
    assert backbone.width == 256
    assert backbone.preprocessing.mean == open_clip.OPENAI_DATASET_MEAN


def test_a_tag_decides_the_preparation_and_the_activation() -> None:
    from selfmask.backbones.loading import resolve, without_weights

    plain, siglip = resolve("open_clip/ViT-B-32:laion2b_e16"), resolve("open_clip/ViT-B-16-SigLIP:webli")
    assert siglip.preprocessing.mean == (0.5, 0.5, 0.5)
    assert plain.preprocessing.interpolation == "bicubic"
    kinds = [
        {type(module).__name__ for module in without_weights(resolve(f"open_clip/ViT-B-32{tag}")).modules()}
        for tag in ("", ":openai", ":laion2b_e16")
    ]
    assert ["QuickGELU" in kind for kind in kinds] == [True, True, False]


def test_without_open_clip_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip", None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=r"selfmask\[clip\]"):
        load_backbone("open_clip/RN50")
