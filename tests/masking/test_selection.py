"""Which weights carry a mask: right for any architecture, and clear errors where nothing sensible can be done."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.errors import ConfigError, SelectionError

from .architectures import (
    ARCHITECTURES,
    base_of,
    digits_base,
    named_scores,
    perturb_scores,
    score_gradients,
    timm_model,
)

# The base is called directly here, on purpose, to compare with.
pytestmark = pytest.mark.filterwarnings("ignore::selfmask.errors.DirectCallWarning")


def selected(model: nn.Module, select: str | list[str] = "auto", exclude: list[str] | None = None) -> list[str]:
    return list(get_masked_model(model, MaskConfig(select=select, exclude=exclude or [])).pack().sizes)


# ---- auto -------------------------------------------------------------------------------------------------------

LEFT_ALONE = {  # the classifier, and the embedding of patches, where each family keeps them
    "resnet18": ["fc"],
    "resnet50": ["fc"],
    "resnext": ["fc"],
    "convnext": ["head.fc"],
    "efficientnet_lite0": ["classifier"],
    "mobilenetv3": ["classifier"],
    "regnet": ["head.fc"],
    "vit": ["patch_embed.proj", "head"],
    "swin": ["patch_embed.proj", "head.fc"],
    "attention": ["fc"],
    "conv1d": ["fc"],
    "conv3d": ["fc"],
    "open_clip": ["conv1"],
    "transformers_clip": ["embeddings.patch_embedding"],
}
PROJECTIONS = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_auto(architecture: str) -> None:
    """Weights and biases of every convolution, linear layer and attention, and nothing else."""
    model = base_of(architecture)
    modules = dict(model.named_modules())
    for prefix in LEFT_ALONE[architecture]:
        assert isinstance(modules.pop(prefix), nn.Linear | nn.Conv2d)
    expected = set()
    for prefix, module in modules.items():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            expected |= {f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)}
        if isinstance(module, nn.MultiheadAttention):
            expected |= {f"{prefix}.{name}" for name in PROJECTIONS if getattr(module, name) is not None}
    found = selected(model)
    assert set(found) == expected
    assert len(found) == len(expected)
    # what the names say of what must never be masked
    assert not [name for name in found if re.search(r"norm|bn|embed|token|relative|bias_[kv]|gamma|fc\.fc", name)]


def test_auto_with_word_embeddings() -> None:
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(10, 4),
            "bag": nn.EmbeddingBag(10, 4),
            "mix": nn.Linear(4, 4),
            "up": nn.ConvTranspose2d(2, 2, 3),
            "scale": nn.GroupNorm(2, 4),
            "head": nn.Linear(4, 2),
        }
    )
    assert selected(model) == ["mix.weight", "mix.bias", "up.weight", "up.bias"]


def test_auto_on_a_single_layer() -> None:
    assert selected(nn.Linear(3, 2)) == ["weight", "bias"]


def test_auto_knows_a_wrapped_classifier() -> None:
    """People wrap a timm model in a module of their own; its classifier is still one."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = timm_model("resnet18", channels=(4, 4, 4, 4))

    assert not [name for name in selected(Wrapped()) if ".fc." in name]


def test_auto_without_a_classifier() -> None:
    """timm models made for features have an Identity there; all of their convolutions are masked."""
    model = timm_model("resnet18", channels=(4, 4, 4, 4))
    features = timm_model("resnet18", channels=(4, 4, 4, 4))
    features.reset_classifier(0)
    assert selected(model) == selected(features)


def test_paper_resnet_takes_the_downsample_norms() -> None:
    found = selected(base_of("resnet50"), "paper-resnet")
    norms = [name for name in found if re.search(r"downsample\.1\.", name)]
    assert len(norms) == 6  # of these narrow channels; stages 2 to 4, weight and bias
    assert not [name for name in found if "bn" in name or name.startswith("fc")]


def test_paper_vit_stays_in_the_blocks() -> None:
    for architecture, blocks in (("vit", "blocks."), ("open_clip", "transformer.resblocks."), ("swin", "layers.")):
        found = selected(base_of(architecture), "paper-vit")
        assert found
        assert all(name.startswith(blocks) for name in found)


def test_all_is_all() -> None:
    for architecture in ("vit", "resnet18"):
        model = base_of(architecture)
        assert selected(model, "all") == [name for name, _ in model.named_parameters()]


# ---- stages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "stages", "prefixes"),
    [
        ("resnet18", "1-2", ["layer1.", "layer2."]),
        ("convnext", "2-3", ["stages.1.", "stages.2."]),
        ("regnet", "1-1", ["s1."]),
        ("vit", "2-2", ["blocks.1."]),
        ("swin", "1-2", ["layers.0.", "layers.1."]),
        ("efficientnet_lite0", "1-3", ["blocks.0.", "blocks.1.", "blocks.2."]),
        ("open_clip", "1-1", ["transformer.resblocks.0."]),
        ("transformers_clip", "2-9", ["encoder.layers.1."]),
    ],
)
def test_stages(architecture: str, stages: str, prefixes: list[str]) -> None:
    """All of "auto" that lies in these stages (ResNets: of "paper-resnet"), and nothing from elsewhere."""
    model = base_of(architecture)
    whole = selected(model, "paper-resnet" if architecture == "resnet18" else "auto")
    expected = [name for name in whole if name.startswith(tuple(prefixes))]
    assert all(any(name.startswith(prefix) for name in expected) for prefix in prefixes)
    assert selected(model, f"stages:{stages}") == expected


# ---- patterns ---------------------------------------------------------------------------------------------------


def test_globs_and_exclude() -> None:
    model = base_of("resnet18")
    found = selected(model, ["layer1.*", "fc.weight"], ["*.bn?.*", "*downsample*", "layer1.1.conv2.weight"])
    assert found == ["layer1.0.conv1.weight", "layer1.0.conv2.weight", "layer1.1.conv1.weight", "fc.weight"]


def test_exclude_narrows_a_named_selection() -> None:
    model = base_of("vit")
    assert selected(model, "auto", ["*.bias"]) == [name for name in selected(model) if not name.endswith(".bias")]


def test_patterns_overlap_without_harm() -> None:
    assert selected(digits_base(), ["0.*", "*.weight"], ["[14].*"]) == ["0.weight", "3.weight", "8.weight"]


def test_only_selected_weights_change() -> None:
    masked = get_masked_model(digits_base(), MaskConfig(select=["3.weight"], s0=-1.0))
    merged, base = masked.merge_and_unload().state_dict(), masked.base.state_dict()
    assert [name for name, value in base.items() if not torch.equal(merged[name], value)] == ["3.weight"]


# ---- what cannot be masked --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (nn.ReLU(), MaskConfig(), "nothing to mask in ReLU"),
        (nn.Sequential(nn.BatchNorm2d(3)), MaskConfig(), "nothing to mask"),
        (nn.Linear(2, 2), MaskConfig(exclude=["*"]), "nothing to mask"),
        (nn.Linear(2, 2), MaskConfig(select=[]), "nothing to mask"),
        (nn.Linear(2, 2), MaskConfig(select="stages:2-3"), "nothing to mask"),
        (nn.Linear(2, 2), MaskConfig(select=["weight", "wieght"]), "'wieght' matches no parameter of Linear"),
        (nn.Linear(2, 2), MaskConfig(select=["WEIGHT"]), "matches no parameter"),
        (nn.Linear(2, 2), MaskConfig(select="most"), "unknown selection"),
        (nn.Linear(2, 2), MaskConfig(select="stages:1"), "unknown selection"),
    ],
)
def test_nothing_to_mask(model: nn.Module, config: MaskConfig, message: str) -> None:
    with pytest.raises(SelectionError, match=message) as caught:
        get_masked_model(model, config)
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, ValueError)


def test_a_failed_selection_leaves_the_model_alone() -> None:
    """The user goes on with the model, and must not find it frozen."""
    model = digits_base().eval()
    model[3].requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(SelectionError):
        get_masked_model(model, MaskConfig(select=["nothing"]))
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert not model.training


class WithCodes(nn.Module):
    """A quantised layer beside an ordinary one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.plain = nn.Linear(4, 4)
        self.codes = nn.Parameter(torch.zeros(4, 4, dtype=dtype), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_only_floating_point_weights(dtype: torch.dtype) -> None:
    for select in ("all", ["codes"], ["plain.*", "codes"]):
        with pytest.raises(SelectionError, match="floating-point") as caught:
            get_masked_model(WithCodes(dtype), MaskConfig(select=select))
        assert "codes" in str(caught.value)
    assert selected(WithCodes(dtype)) == ["plain.weight", "plain.bias"]
    assert selected(WithCodes(dtype), "all", ["codes"]) == ["plain.weight", "plain.bias"]


@pytest.mark.parametrize("name", ["keys", "values", "pop"])
def test_names_that_containers_use_themselves(name: str) -> None:
    """A memory bank may call its parameters so."""
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(torch.randn(3, 3)))
    assert selected(model, "all") == [name]


def test_names_with_slashes(tmp_path: Path) -> None:
    """Networks that came from TensorFlow have them."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("block/conv", nn.Linear(4, 4))
    model.add_module("block", nn.Sequential(nn.Linear(4, 4)))
    masked = get_masked_model(model)
    assert masked(torch.randn(2, 4)).shape == (2, 4)
    assert list(masked.pack().sizes) == ["block/conv.weight", "block/conv.bias", "block.0.weight", "block.0.bias"]
    masked.save_pretrained(tmp_path / "mask.smn")
    assert MaskedModel.from_pretrained(model, tmp_path / "mask.smn").num_masked == masked.num_masked


# ---- tied weights -----------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers with one weight: as one Parameter in two places, or as two Parameters over one memory."""

    def __init__(self, same_parameter: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight if same_parameter else nn.Parameter(self.first.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


tied = pytest.mark.parametrize("same_parameter", [True, False])


@tied
@pytest.mark.parametrize("select", ["auto", ["first.weight"], ["second.weight"]])
def test_tied_weights_are_masked_once(same_parameter: bool, select: str | list[str], tmp_path: Path) -> None:
    """Both uses see the mask, and its gradient is the sum of both; on disk and merged as well."""
    base = Tied(same_parameter)
    masked = get_masked_model(base, MaskConfig(select=select))
    assert masked.num_masked == (36 + 12 if select == "auto" else 36)
    perturb_scores(masked)
    x = torch.randn(5, 6)
    masked(x).square().sum().backward()
    name = "second.weight" if select == ["second.weight"] else "first.weight"

    score = named_scores(masked)[name].detach().clone().requires_grad_()
    mask = (score > 0).float() + score - score.detach()
    weight = base.first.weight.detach() * mask / mask.mean().sqrt()
    replaced = {"first.weight": weight, "second.weight": weight}
    for other, other_score in named_scores(masked).items():
        if other != name:
            off = (other_score.detach() > 0).float()
            replaced[other] = base.get_parameter(other).detach() * off / off.mean().sqrt()
    expected = functional_call(Tied(False), replaced, (x,))
    expected.square().sum().backward()
    torch.testing.assert_close(masked(x), expected)
    torch.testing.assert_close(score_gradients(masked)[name], score.grad, rtol=1e-4, atol=1e-5)

    masked.save_pretrained(tmp_path / "tied.smn")
    loaded = MaskedModel.from_pretrained(Tied(same_parameter), tmp_path / "tied.smn")
    assert loaded.num_masked == masked.num_masked
    with torch.no_grad():
        expected = masked(x)
        assert torch.equal(loaded(x), expected)
        for merged in (masked.merge_and_unload(), loaded.merge_and_unload()):
            assert torch.equal(merged.first.weight, merged.second.weight)
            assert torch.equal(merged(x), expected)
            assert (merged.first.weight is merged.second.weight) == same_parameter


def test_shared_modules_are_masked_once(tmp_path: Path) -> None:
    """The same module in two places, as in recurrent transformers; the base must come out of a call unharmed."""
    layer = nn.Linear(4, 4)
    base, before = nn.Sequential(layer, nn.ReLU(), layer), copy.deepcopy(layer)
    masked = get_masked_model(base, MaskConfig())
    perturb_scores(masked)
    assert masked.num_masked == 20
    x = torch.randn(3, 4)
    masked(x).sum().backward()
    assert torch.equal(layer.weight, before.weight)
    assert isinstance(layer.weight, nn.Parameter)
    masked.save_pretrained(tmp_path / "shared.smn")
    loaded = MaskedModel.from_pretrained(base, tmp_path / "shared.smn")
    with torch.no_grad():
        expected = masked(x)
        assert not torch.equal(expected, base(x))
        assert torch.equal(loaded(x), expected)
        merged = masked.merge_and_unload()
        assert merged[0] is merged[2]
        assert torch.equal(merged(x), expected)


class Views(nn.Module):
    """One fused projection, and its parts as parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(12, 4))
        self.q, self.k, self.v = (nn.Parameter(part) for part in self.fused.data.chunk(3))
        self.other = nn.Linear(4, 4)


@pytest.mark.parametrize("select", ["all", ["fused"], ["q"], ["k"], ["v"]])
def test_views_that_overlap_in_part_are_refused(select: str | list[str]) -> None:
    """A mask on a part would have to show in the whole, and cannot."""
    with pytest.raises(SelectionError, match="same memory") as caught:
        get_masked_model(Views(), MaskConfig(select=select))
    assert "exclude" in str(caught.value)


def test_views_of_one_memory_that_do_not_overlap() -> None:
    model = Views()
    del model.fused
    assert selected(model, ["q", "v"]) == ["q", "v"]
    assert selected(Views(), ["other.*"]) == ["other.weight", "other.bias"]


def test_a_transposed_tie_is_refused() -> None:
    model = nn.Module()
    model.up = nn.Linear(3, 5)
    model.down = nn.Linear(5, 3)
    model.down.weight = nn.Parameter(model.up.weight.data.T)
    with pytest.raises(SelectionError, match="same memory"):
        get_masked_model(model)
