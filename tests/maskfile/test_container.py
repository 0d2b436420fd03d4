"""A mask file gives back all that went in, on its own base and on no other."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.errors import ConfigError, CorruptMaskFileError, RelativeMaskError, SelfmaskError, WrongBaseError
from selfmask.maskfile import PackedMask, inspect_mask_file, write_mask_file
from selfmask.masking.norms import norm_buffers, saved_statistics
from selfmask.preprocessing import Preprocessing

from . import smn
from .tiny import Tiny, flags, images, masked_with, set_flags


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit: NaN equals itself, and 0 is not -0."""
    return a.dtype == b.dtype and a.shape == b.shape and bytes(a.numpy().tobytes()) == bytes(b.numpy().tobytes())


def loaded(base: nn.Module, path: Path) -> PackedMask:
    return MaskedModel.from_pretrained(base, path).pack()


def flat_weights(base: nn.Module, mask: PackedMask) -> dict[str, torch.Tensor]:
    return {name: base.get_parameter(name).detach().flatten() for name in mask.bits}


# ---- everything comes back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sparse", "large", "dense", "stripes", "on", "off"])
def test_the_model_runs_as_before(base: Tiny, tmp_path: Path, kind: str) -> None:
    masked = masked_with(base, kind)
    masked.train()
    masked(images())  # moves the statistics away from the base's own
    masked.eval()
    expected = masked(images())
    size = masked.save_pretrained(tmp_path / "a.smn")
    assert size == (tmp_path / "a.smn").stat().st_size
    again = MaskedModel.from_pretrained(Tiny(), tmp_path / "a.smn")
    assert torch.equal(again(images()), expected)
    assert again.num_masked == masked.num_masked == 2952
    assert again.sparsity() == masked.sparsity()


@pytest.mark.parametrize("kind", ["sparse", "large", "dense", "stripes", "on", "off"])
def test_an_independent_reader_finds_the_same_bits(base: Tiny, tmp_path: Path, kind: str) -> None:
    """`smn.py` knows nothing of the library; the hashes in the file are what the specification says."""
    masked_with(base, kind).save_pretrained(tmp_path / "a.smn")
    file = smn.parse((tmp_path / "a.smn").read_bytes())
    coded = {name: (entry["codec"], file.tensors[f"mask.{name}"][2]) for name, entry in file.manifest["masks"].items()}
    magnitudes = {name: base.get_parameter(name).abs().flatten().tolist() for name in coded}
    bits = smn.decode(coded, file.tensors.get("lzma", ("U8", [0], b""))[2], magnitudes)
    names = [name for name, _ in base.named_parameters() if "norm" not in name]
    expected = {name: flags(kind, base.get_parameter(name), i) for i, name in enumerate(names)}
    assert bits == {name: on.astype(int).tolist() for name, on in expected.items()}
    assert file.manifest["mask_sha256"] == smn.mask_hash(bits)
    assert file.metadata["sha256"] == smn.content_hash(
        smn.hashed(file.metadata, file.metadata["manifest"]), file.stored
    )
    assert {name: entry["active"] for name, entry in file.manifest["masks"].items()} == {
        name: int(on.sum()) for name, on in expected.items()
    }


def test_every_field_comes_back(base: Tiny, tmp_path: Path) -> None:
    base.pretrained_cfg = {
        "architecture": "tiny",
        "tag": "v1",
        "input_size": (3, 9, 11),
        "mean": (0.1, 0.2, 0.3),
        "std": (1.5, 2.5, 1 / 3),
        "interpolation": "bicubic",
    }
    config = MaskConfig(rule="topk", active_share=0.3, mu=-0.25, s0=2.0, select=["conv*", "proj.*"], exclude=["*bias"])
    masked = get_masked_model(base, config)
    head = {
        "weight": torch.randn(5, 40),
        "bias": torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45]),
        "classes": torch.arange(5),
        "scale": torch.tensor(0.5, dtype=torch.float16),
        "none": torch.empty(0, 3),
        "transposed": torch.randn(4, 3).t(),
        "flags": torch.tensor([True, False]),
        "wide": torch.randn(2, dtype=torch.float64),
        "half": torch.randn(3, dtype=torch.bfloat16).view(3),
    }
    notes = 'Birds of "Zürich" 🐦\n\0\\ {}'
    masked.save_pretrained(tmp_path / "a.smn", head=head, notes=notes)
    mask = loaded(base, tmp_path / "a.smn")
    assert mask.notes == notes
    assert mask.base_name == "tiny.v1"
    assert mask.preprocessing == Preprocessing((9, 11), (0.1, 0.2, 0.3), (1.5, 2.5, 1 / 3), "bicubic")
    assert MaskConfig.from_dict(mask.config) == config
    assert set(mask.bits) == {"conv1.weight", "conv2.weight", "proj.weight"}
    assert mask.shapes["conv2.weight"] == (24, 8, 3, 3)
    assert mask.head.keys() == head.keys()
    for name, value in head.items():
        assert same(
            mask.head[name].view(torch.uint8) if name == "half" else mask.head[name],
            value.view(torch.uint8) if name == "half" else value.contiguous(),
        ), name


def test_norm_statistics_are_exact(base: Tiny, tmp_path: Path) -> None:
    """Every bit pattern survives, odd ones too."""
    odd = torch.tensor([0.0, -0.0, 1e-45, 3e-39, 1.8e19, -1.8e19, 1 / 3, 1.0])
    mask = masked_with(base).pack().replaced(norm={"norm.running_mean": odd, "norm.running_var": odd.flip(0).abs()})
    write_mask_file(tmp_path / "a.smn", mask, flat_weights(base, mask), saved_statistics(norm_buffers(base)))
    norm = loaded(base, tmp_path / "a.smn").norm
    assert same(norm["norm.running_mean"], odd)
    assert same(norm["norm.running_var"], odd.flip(0).abs())


@pytest.mark.parametrize(
    ("key", "value"),
    [("mean", math.nan), ("mean", math.inf), ("mean", -1e37), ("var", math.nan), ("var", -1e-9), ("var", 1e37)],
)
def test_statistics_that_no_images_have(base: Tiny, tmp_path: Path, key: str, value: float) -> None:
    """With them, all vectors would be NaN: neither written nor read."""
    masked = masked_with(base)
    file = smn.parse(masked.mask_bytes())
    numbers = torch.ones(8)
    numbers[3] = value
    file.tensors[f"norm.norm.running_{key}"] = ("F32", [8], numbers.numpy().tobytes())
    with pytest.raises(CorruptMaskFileError, match="no images have"):
        MaskedModel.from_pretrained(base, smn.build(file))
    masked._norm.get_buffer(f"norm/running_{key}").copy_(numbers)
    with pytest.raises(ConfigError, match="not finite"):
        masked.save_pretrained(tmp_path / "a.smn")


def test_a_loaded_mask_saves_to_the_same_mask(base: Tiny, tmp_path: Path) -> None:
    """Load and save is a copy: nothing is lost on the way, and the masks keep their identity."""
    masked_with(base, "large").save_pretrained(tmp_path / "a.smn", head={"w": torch.ones(3)}, notes="first")
    again = MaskedModel.from_pretrained(base, tmp_path / "a.smn")
    again.save_pretrained(tmp_path / "b.smn")
    a, b = (smn.parse((tmp_path / name).read_bytes()) for name in ("a.smn", "b.smn"))
    assert a == b


def test_notes_survive_a_new_head(base: Tiny, tmp_path: Path) -> None:
    """Adding one thing to a loaded mask does not drop another."""
    masked_with(base).save_pretrained(tmp_path / "a.smn", head={"w": torch.ones(3)}, notes="first")
    again = MaskedModel.from_pretrained(base, tmp_path / "a.smn")
    again.save_pretrained(tmp_path / "b.smn", head={"w": torch.zeros(2)})
    assert loaded(base, tmp_path / "b.smn").notes == "first"
    again.save_pretrained(tmp_path / "c.smn", notes="second")
    mask = loaded(base, tmp_path / "c.smn")
    assert mask.notes == "second"
    assert same(mask.head["w"], torch.ones(3))


def test_the_library_of_safetensors_reads_it(base: Tiny, tmp_path: Path) -> None:
    masked = masked_with(base, "stripes")
    masked.save_pretrained(tmp_path / "a.smn", head={"w": torch.ones(3)})
    tensors = safetensors.torch.load_file(tmp_path / "a.smn")
    with safe_open(tmp_path / "a.smn", "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "selfmask"
    assert metadata["version"] == "2"
    assert json.loads(smn.unpacked_text(metadata["manifest"]))["masks"].keys() == masked.sparsity().keys() - {"total"}
    assert set(tensors) == {"masks", "lzma", "ext.norm_codes.codes", "head.w"}
    assert torch.equal(tensors["head.w"], torch.ones(3))


def test_inspect_needs_no_base_and_its_sizes_add_up(base: Tiny, tmp_path: Path) -> None:
    masked = masked_with(base, "large")
    masked.save_pretrained(tmp_path / "a.smn", head={"w": torch.ones(3)}, notes="n")
    manifest, parts = inspect_mask_file(tmp_path / "a.smn")
    file = smn.parse((tmp_path / "a.smn").read_bytes())
    assert parts["file"] == (tmp_path / "a.smn").stat().st_size == sum(parts.values()) - parts["file"]
    assert parts["norm"] == len(file.tensors["ext.norm_codes.codes"][2]) < 8 * 4
    assert parts["head"] == 3 * 4
    assert parts["masks"] == sum(len(data) for key, (_, _, data) in file.tensors.items() if key.startswith("mask."))
    assert manifest.notes == "n"
    assert {name: entry.active / entry.bits for name, entry in manifest.masks.items()} == {
        name: share for name, share in masked.sparsity().items() if name != "total"
    }


def test_a_loaded_mask_needs_its_file_no_more(base: Tiny, tmp_path: Path) -> None:
    """Nothing may point into the mapped file: it can be cut or deleted at any time."""
    masked = masked_with(base, "dense")
    masked.save_pretrained(tmp_path / "a.smn", head={"w": torch.ones(3)})
    again = MaskedModel.from_pretrained(base, tmp_path / "a.smn")
    (tmp_path / "a.smn").write_bytes(b"")
    assert torch.equal(again(images()), masked(images()))
    assert torch.equal(again.pack().head["w"], torch.ones(3))


def test_a_model_without_norms(tmp_path: Path) -> None:
    base = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 10))
    for norm in ("adapt", "frozen"):
        masked = masked_with(base, norm=norm)
        masked.save_pretrained(tmp_path / f"{norm}.smn")
        x = torch.randn(4, 30)
        assert torch.equal(MaskedModel.from_pretrained(base, tmp_path / f"{norm}.smn")(x), masked(x))


def test_paths_may_be_text_or_paths_and_folders_are_made(base: Tiny, tmp_path: Path) -> None:
    masked = masked_with(base)
    masked.save_pretrained(str(tmp_path / "new" / "folder" / "ä b.smn"))
    assert MaskedModel.from_pretrained(base, str(tmp_path / "new" / "folder" / "ä b.smn")).pack().sha256


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_bases_of_other_types(tmp_path: Path, dtype: torch.dtype) -> None:
    """A mask learned on a double or half base runs on it again, to the last bit, statistics included."""
    base = Tiny().to(dtype)
    masked = masked_with(base, "large")
    masked.train()
    masked(images().to(dtype))
    masked.eval()
    masked.save_pretrained(tmp_path / "a.smn")
    again = MaskedModel.from_pretrained(base, tmp_path / "a.smn")
    assert torch.equal(again(images().to(dtype)), masked(images().to(dtype)))


def test_channels_last_is_the_same_base(base: Tiny, tmp_path: Path) -> None:
    """The layout in memory changes neither the fingerprint nor the order of the bits."""
    masked = masked_with(base, "large")
    masked.save_pretrained(tmp_path / "a.smn")
    other = Tiny().to(memory_format=torch.channels_last)
    again = MaskedModel.from_pretrained(other, tmp_path / "a.smn")
    assert again.pack().sha256 == masked.pack().sha256
    again.save_pretrained(tmp_path / "b.smn")
    torch.testing.assert_close(MaskedModel.from_pretrained(base, tmp_path / "b.smn")(images()), masked(images()))


# ---- a base that was converted ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, {"fraction": 0.5, "fraction_by": "magnitude"}], ids=["all", "fraction"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_load_on_a_converted_model(tmp_path: Path, dtype: torch.dtype, config: dict[str, object]) -> None:
    """`.to(bfloat16)` keeps the fingerprint, so masks of the float32 base must load, whole, or be refused plainly."""
    original = masked_with(Tiny(), "large", **config)
    original.save_pretrained(tmp_path / "a.smn")
    masked = masked_with(Tiny(), "sparse", **config)
    masked.to(dtype)
    try:
        masked.load_mask(tmp_path / "a.smn", "a")
    except WrongBaseError:
        return
    masked.set_mask("a")
    assert masked.pack().sha256 == original.pack().sha256
    assert masked(images().to(dtype)).dtype == dtype
    torch.testing.assert_close(masked(images().to(dtype)).float(), original(images()), atol=0.2, rtol=0.1)


@pytest.mark.parametrize("norm", ["adapt", "frozen"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_save_from_a_converted_model(tmp_path: Path, dtype: torch.dtype, norm: str) -> None:
    """What a converted model saves loads on the base its fingerprint names, or is not saved at all."""
    masked = masked_with(Tiny(), "large", norm=norm)
    expected = masked.pack().sha256
    masked.to(dtype)
    try:
        masked.save_pretrained(tmp_path / "a.smn")
    except SelfmaskError:
        assert list(tmp_path.iterdir()) == []
        return
    assert loaded(Tiny(), tmp_path / "a.smn").sha256 == expected


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.8])
def test_a_loaded_fraction_mask_stays_itself_through_a_conversion(tmp_path: Path, fraction: float) -> None:
    """Which weights carry bits is a matter of the original base: rounding must not move the bits to others."""
    masked_with(Tiny(), "off", fraction=fraction, fraction_by="magnitude").save_pretrained(tmp_path / "a.smn")
    masked = MaskedModel.from_pretrained(Tiny(), tmp_path / "a.smn")
    off = {name: value == 0 for name, value in masked.merge_and_unload().named_parameters()}
    masked.to(torch.bfloat16)
    for name, value in masked.merge_and_unload().named_parameters():
        assert torch.equal(value == 0, off[name]), name


# ---- the wrong base ---------------------------------------------------------------------------------------------


def refused(base: nn.Module, path: Path) -> WrongBaseError:
    with pytest.raises(WrongBaseError) as caught:
        MaskedModel.from_pretrained(base, path)
    for part in ("expected:", "found:", "do:"):
        assert part in str(caught.value)
    return caught.value


def test_another_architecture_is_refused(base: Tiny, tmp_path: Path) -> None:
    masked_with(base).save_pretrained(tmp_path / "a.smn")
    refused(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), tmp_path / "a.smn")


def test_another_shape_is_refused(base: Tiny, tmp_path: Path) -> None:
    masked_with(base).save_pretrained(tmp_path / "a.smn")
    base.proj = nn.Linear(24, 41)
    assert "proj" in str(refused(base, tmp_path / "a.smn"))


def test_other_weights_are_refused(base: Tiny, tmp_path: Path) -> None:
    masked_with(base).save_pretrained(tmp_path / "a.smn")
    refused(Tiny(seed=1), tmp_path / "a.smn")


@pytest.mark.parametrize("name", ["conv1.weight", "conv1.bias", "conv2.weight", "proj.weight", "proj.bias"])
def test_one_weight_off_by_one_ulp_is_refused(base: Tiny, tmp_path: Path, name: str) -> None:
    masked_with(base).save_pretrained(tmp_path / "a.smn")
    with torch.no_grad():
        last = base.get_parameter(name).view(-1)[-1:]
        last.copy_(torch.nextafter(last, torch.tensor(2.0)))
    refused(base, tmp_path / "a.smn")


def test_another_type_is_refused(base: Tiny, tmp_path: Path) -> None:
    masked_with(base).save_pretrained(tmp_path / "a.smn")
    refused(Tiny().double(), tmp_path / "a.smn")


def test_weights_that_carry_no_mask_may_not_differ(base: Tiny, tmp_path: Path) -> None:
    """They decide the output as much."""
    masked_with(base, select=["conv*"]).save_pretrained(tmp_path / "a.smn")
    nn.init.zeros_(base.proj.weight)
    assert "another beside them" in str(refused(base, tmp_path / "a.smn"))


def test_a_base_changed_after_a_load_is_noticed(base: Tiny, tmp_path: Path) -> None:
    """Fingerprints are remembered, but not beyond a change."""
    masked_with(base).save_pretrained(tmp_path / "a.smn")
    masked = MaskedModel.from_pretrained(base, tmp_path / "a.smn")
    with torch.no_grad():
        base.conv2.weight[0, 0, 0, 0] += 1
    with pytest.raises(WrongBaseError):
        masked.load_mask(tmp_path / "a.smn", "again")


def test_norm_layers_that_the_file_does_not_know(base: Tiny, tmp_path: Path) -> None:
    """More batch norms, or wider ones, than the mask was learned with: another base."""
    masked_with(base, select=["conv1.*"]).save_pretrained(tmp_path / "a.smn")
    more = Tiny()
    more.extra = nn.BatchNorm2d(4)
    with pytest.raises(SelfmaskError, match=r"extra|base|missing"):
        MaskedModel.from_pretrained(more, tmp_path / "a.smn")
    wider = Tiny()
    wider.norm = nn.BatchNorm2d(9)
    refused(wider, tmp_path / "a.smn")


# ---- batch-norm policy ------------------------------------------------------------------------------------------


def test_frozen_statistics_are_checked_instead_of_stored(base: Tiny, tmp_path: Path) -> None:
    masked = masked_with(base, norm="frozen")
    masked.save_pretrained(tmp_path / "a.smn")
    assert not any("norm" in key for key in safetensors.torch.load_file(tmp_path / "a.smn"))
    assert torch.equal(MaskedModel.from_pretrained(Tiny(), tmp_path / "a.smn")(images()), masked(images()))
    other = Tiny()
    other.norm.running_mean[3] += 1e-3
    refused(other, tmp_path / "a.smn")


def test_a_failed_load_leaves_the_model_as_it_was(base: Tiny, tmp_path: Path) -> None:
    masked = masked_with(base)
    masked.save_pretrained(tmp_path / "a.smn")
    before = masked(images())
    (tmp_path / "b.smn").write_bytes((tmp_path / "a.smn").read_bytes()[:-1])
    with pytest.raises(SelfmaskError):
        masked.load_mask(tmp_path / "b.smn", "b")
    assert masked.mask_names == ["default"]
    assert torch.equal(masked(images()), before)
    masked.load_mask(tmp_path / "a.smn", "b")  # the name is free still
    with pytest.raises(ConfigError):
        masked.load_mask(tmp_path / "a.smn", "b")


# ---- a fraction of the weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["random", "magnitude"])
@pytest.mark.parametrize("fraction", [0.05, 0.5])
def test_a_fraction_stores_only_its_bits(base: Tiny, tmp_path: Path, by: str, fraction: float) -> None:
    masked = masked_with(base, "dense", fraction=fraction, fraction_by=by, seed=3)
    masked.save_pretrained(tmp_path / "a.smn")
    manifest, parts = inspect_mask_file(tmp_path / "a.smn")
    bits = sum(entry.bits for entry in manifest.masks.values())
    assert bits == masked.num_masked
    assert abs(bits / 2952 - fraction) < 0.04
    assert parts["masks"] <= sum(-(-entry.bits // 8) for entry in manifest.masks.values())
    again = MaskedModel.from_pretrained(Tiny(), tmp_path / "a.smn")
    assert torch.equal(again(images()), masked(images()))
    assert again.num_masked == bits


# ---- relative files ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    """A dispatcher, an expert that differs from it in few weights, and their files."""

    dispatcher: Path
    expert: Path
    plain: Path
    masked: MaskedModel


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    masked = masked_with(Tiny(), "dense")
    files = Pair(tmp_path / "dispatcher.smn", tmp_path / "expert.smn", tmp_path / "plain.smn", masked)
    masked.save_pretrained(files.dispatcher)
    on = {key: flags("dense", score, i) for i, (key, score) in enumerate(masked.scores.items())}
    set_flags(masked, {key: value ^ ~flags("sparse", torch.empty(value.size), 9) for key, value in on.items()})
    masked.save_pretrained(files.plain)
    masked.save_pretrained(files.expert, relative_to=files.dispatcher)
    return files


def test_a_relative_file_is_the_same_mask_in_fewer_bytes(pair: Pair) -> None:
    again = MaskedModel.from_pretrained(Tiny(), pair.expert, relative_to=pair.dispatcher)
    assert torch.equal(again(images()), pair.masked(images()))
    assert again.pack().sha256 == pair.masked.pack().sha256 != loaded(Tiny(), pair.dispatcher).sha256
    relative, plain = (inspect_mask_file(path)[1]["masks"] for path in (pair.expert, pair.plain))
    assert relative < 0.4 * plain
    assert smn.parse(pair.expert.read_bytes()).manifest["relative_to"] == loaded(Tiny(), pair.dispatcher).sha256


def test_relative_to_a_loaded_mask_by_name(pair: Pair, tmp_path: Path) -> None:
    pair.masked.load_mask(pair.dispatcher, "dispatcher")
    pair.masked.save_pretrained(tmp_path / "named.smn", relative_to="dispatcher")
    a, b = (smn.parse(path.read_bytes()) for path in (tmp_path / "named.smn", pair.expert))
    assert a == b
    masked = MaskedModel(Tiny())
    masked.load_mask(pair.dispatcher, "first")
    masked.load_mask(tmp_path / "named.smn", "second", relative_to="first")
    masked.set_mask("second")
    assert torch.equal(masked(images()), pair.masked(images()))


def test_a_reference_that_is_loaded_is_found(pair: Pair) -> None:
    masked = MaskedModel(Tiny())
    masked.load_mask(pair.dispatcher, "any name")
    masked.load_mask(pair.expert, "expert")
    masked.set_mask("expert")
    assert torch.equal(masked(images()), pair.masked(images()))


def test_a_reference_under_training_is_found(pair: Pair) -> None:
    """The trainable mask is a mask at hand like any other."""
    dispatcher = masked_with(Tiny(), "dense")
    dispatcher.load_mask(pair.expert, "expert")
    dispatcher.set_mask("expert")
    assert torch.equal(dispatcher(images()), pair.masked(images()))


def test_without_the_reference_it_does_not_load(pair: Pair) -> None:
    with pytest.raises(RelativeMaskError) as caught:
        MaskedModel.from_pretrained(Tiny(), pair.expert)
    for part in ("expected:", "found:", "do:", "relative_to"):
        assert part in str(caught.value)


def test_with_a_wrong_reference_it_does_not_load(pair: Pair, tmp_path: Path) -> None:
    masked_with(Tiny(), "sparse").save_pretrained(tmp_path / "wrong.smn")
    with pytest.raises(RelativeMaskError, match="expected"):
        MaskedModel.from_pretrained(Tiny(), pair.expert, relative_to=tmp_path / "wrong.smn")
    masked = MaskedModel(Tiny())
    masked.load_mask(tmp_path / "wrong.smn", "wrong")
    masked.load_mask(pair.dispatcher, "right")
    with pytest.raises(RelativeMaskError):
        masked.load_mask(pair.expert, "expert", relative_to="wrong")


def test_a_chain_of_relative_files(pair: Pair, tmp_path: Path) -> None:
    """An expert of an expert: loads when each link is at hand, and not before."""
    masked = masked_with(Tiny(), "dense", variant=50)
    masked.load_mask(pair.plain, "expert")
    masked.save_pretrained(tmp_path / "second.smn", relative_to="expert")
    fresh = MaskedModel(Tiny())
    fresh.load_mask(pair.dispatcher, "dispatcher")
    with pytest.raises(RelativeMaskError):
        fresh.load_mask(tmp_path / "second.smn", "second")
    fresh.load_mask(pair.expert, "expert")
    fresh.load_mask(tmp_path / "second.smn", "second")
    fresh.set_mask("second")
    assert torch.equal(fresh(images()), masked(images()))


def test_relative_to_itself(pair: Pair, tmp_path: Path) -> None:
    """Not a change at all: next to no bytes."""
    pair.masked.save_pretrained(tmp_path / "none.smn", relative_to=pair.plain)
    assert inspect_mask_file(tmp_path / "none.smn")[1]["masks"] <= 5 * 5
    assert loaded_with(pair.plain, tmp_path / "none.smn").sha256 == pair.masked.pack().sha256


def loaded_with(reference: Path, path: Path) -> PackedMask:
    return MaskedModel.from_pretrained(Tiny(), path, relative_to=reference).pack()


@pytest.mark.parametrize(
    "config", [{"select": ["conv*"]}, {"select": "all"}, {"fraction": 0.5}], ids=["fewer", "more", "fraction"]
)
def test_relative_to_another_selection_is_refused(pair: Pair, tmp_path: Path, config: dict[str, object]) -> None:
    masked_with(Tiny(), **config).save_pretrained(tmp_path / "other.smn")
    with pytest.raises(RelativeMaskError) as caught:
        pair.masked.save_pretrained(tmp_path / "new.smn", relative_to=tmp_path / "other.smn")
    assert "do:" in str(caught.value)
    assert not (tmp_path / "new.smn").exists()


def test_relative_fraction_files(tmp_path: Path) -> None:
    masked_with(Tiny(), "dense", fraction=0.4, seed=5).save_pretrained(tmp_path / "a.smn")
    masked = masked_with(Tiny(), "dense", variant=77, fraction=0.4, seed=5)
    masked.save_pretrained(tmp_path / "b.smn", relative_to=tmp_path / "a.smn")
    assert loaded_with(tmp_path / "a.smn", tmp_path / "b.smn").sha256 == masked.pack().sha256


def test_the_reference_may_be_relative_itself(pair: Pair, tmp_path: Path) -> None:
    """relative_to=FILE, where FILE needs a mask that is loaded."""
    masked = MaskedModel(Tiny())
    masked.load_mask(pair.dispatcher, "dispatcher")
    masked.load_mask(pair.plain, "plain")
    masked.set_mask("plain")
    masked.save_pretrained(tmp_path / "x.smn", relative_to=pair.expert)
    fresh = MaskedModel(Tiny())
    fresh.load_mask(pair.dispatcher, "dispatcher")
    fresh.load_mask(tmp_path / "x.smn", "x", relative_to=pair.expert)
    fresh.set_mask("x")
    assert fresh.pack().sha256 == masked.pack().sha256


# ---- what was written can be read -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        {"head": {"w": torch.ones(100_000)}},
        {"head": {"w": torch.ones(3, dtype=torch.complex64)}},
        {"head": {"w": torch.ones(3).to(torch.float8_e4m3fn)}},
        {"head": {"w": torch.ones(3).to(torch.uint16)}},
        {"notes": "x" * (9 << 20)},
        {"notes": "a lone \ud800 surrogate"},
        {"head": {"a" * 1000: torch.ones(1)}},
        {"head": {"": torch.ones(1)}},
    ],
    ids=["big head", "complex", "float8", "uint16", "long notes", "surrogate", "long name", "no name"],
)
def test_a_file_that_could_not_be_read_is_not_written(base: Tiny, tmp_path: Path, extra: dict[str, object]) -> None:
    """Better a typed error now than a mask that is lost."""
    masked = masked_with(base)
    try:
        masked.save_pretrained(tmp_path / "a.smn", **extra)  # type: ignore[arg-type]
    except SelfmaskError:
        assert list(tmp_path.iterdir()) == []
        return
    mask = loaded(base, tmp_path / "a.smn")
    assert mask.notes == extra.get("notes", "")
    assert mask.head.keys() == extra.get("head", {}).keys()  # type: ignore[attr-defined]


def test_the_same_mask_gives_the_same_bytes(base: Tiny, tmp_path: Path) -> None:
    """Files can be compared, cached and stored by their content."""
    for name in ("a.smn", "b.smn"):
        masked_with(copy.deepcopy(base), "large").save_pretrained(tmp_path / name, notes="n")
    assert (tmp_path / "a.smn").read_bytes() == (tmp_path / "b.smn").read_bytes()


def test_active_counts_and_identity_are_of_the_bits(base: Tiny) -> None:
    """`PackedMask.sha256` names the bits alone: notes, head and statistics may differ."""
    a, b = (masked_with(base, "dense").pack(notes=notes) for notes in ("one", "two"))
    assert a.sha256 == b.sha256
    flipped = dict(a.bits)
    flipped["conv1.bias"] = np.bitwise_xor(flipped["conv1.bias"], np.uint8(1))
    assert a.replaced(bits=flipped).sha256 != a.sha256
    assert abs(a.replaced(bits=flipped).active["conv1.bias"] - a.active["conv1.bias"]) == 1
