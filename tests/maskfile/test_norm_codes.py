"""Statistics in few bits: near to what they were, the same on every machine, and refused where they lie."""

from __future__ import annotations

import lzma
import struct
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.errors import CorruptMaskFileError
from selfmask.maskfile import inspect_mask_file, norm_codes
from selfmask.maskfile.extensions import CODES

from . import smn
from .tiny import Tiny, images, masked_with

Statistics = dict[str, Tensor]
EPSILON = 2.0**-17


def statistics(seed: int, spread: float = 0.0, moved: float = 0.0) -> tuple[Statistics, Statistics]:
    """Those of a base of three layers, and what became of them: their logarithms moved, by a normal distribution."""
    rng = torch.Generator().manual_seed(seed)
    base, now = dict[str, Tensor](), dict[str, Tensor]()
    for layer, width in (("a", 40), ("b.c", 7), ("b", 100)):
        mean, var = torch.randn(width, generator=rng), torch.randn(width, generator=rng).exp()
        shift, log = (torch.randn(width, generator=rng) for _ in range(2))
        base |= {f"{layer}.running_mean": mean, f"{layer}.running_var": var}
        new = var * (spread * log).exp()
        now |= {f"{layer}.running_mean": mean + moved * shift * new.sqrt(), f"{layer}.running_var": new}
    return base, now


def same(a: Statistics, b: Statistics) -> bool:
    return a.keys() == b.keys() and all(a[name].numpy().tobytes() == b[name].numpy().tobytes() for name in a)


def refused(payload: bytes, base: Statistics) -> None:
    with pytest.raises(CorruptMaskFileError):
        norm_codes.decode(payload, base, {})


# ---- what comes back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spread", "moved"), [(0.0, 0.0), (0.05, 0.05), (0.5, 0.3), (3.0, 50.0)])
def test_they_come_back_to_the_bit_and_an_oracle_finds_the_same(spread: float, moved: float) -> None:
    base, now = statistics(0, spread, moved)
    near = norm_codes.rounded(now, base)
    payload, coded = norm_codes.encode(near, base)
    assert coded == set(base)
    assert same(norm_codes.decode(payload, base, {}), near)
    found = smn.statistics(payload, {name: value.tolist() for name, value in base.items()})
    assert {name: struct.pack(f"<{len(values)}f", *values) for name, values in found.items()} == {
        name: value.numpy().tobytes() for name, value in near.items()
    }


def test_what_did_not_move_takes_nothing_and_is_the_bases_own() -> None:
    base = {"running_mean": torch.tensor([0.0, -0.0, 1e-45, 1e19] * 500), "running_var": torch.rand(2000)}
    payload, coded = norm_codes.encode(norm_codes.rounded(base, base), base)
    assert len(payload) < 40
    assert coded == set(base)
    assert same(norm_codes.decode(payload, base, {}), base)


def test_they_take_a_quarter_of_float32_or_less() -> None:
    base, now = statistics(1, 0.1, 0.05)
    payload, _ = norm_codes.encode(norm_codes.rounded(now, base), base)
    assert len(payload) < 294


numbers = (
    st.floats(-(2.0**63), 2.0**63, width=32)
    | st.floats(-10, 10, width=32)
    | st.sampled_from([0.0, 1e-45, 1e-38, -1e-9])
)
vectors = arrays(np.float32, (4, 5), elements=numbers)


@settings(max_examples=100, deadline=None)
@given(vectors, st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]))
def test_any_numbers_stay_near_or_as_they_are(values: Any, dtype: torch.dtype) -> None:
    """Half a step off at most; twice is as once; files lose nothing."""
    limit = 6e4 if dtype == torch.float16 else 1e18
    mean, new_mean, var, new_var = torch.from_numpy(values).clamp(-limit, limit).to(dtype)
    base = {"x.running_mean": mean, "x.running_var": var.abs()}
    now = {"x.running_mean": new_mean, "x.running_var": new_var.abs()}
    near = norm_codes.rounded(now, base)
    again = norm_codes.rounded(near, base)
    assert all(torch.equal(near[name], again[name]) for name in now)
    assert all(value.dtype == dtype for value in near.values())
    payload, coded = norm_codes.encode(near, base)
    others = {name: value for name, value in near.items() if name not in coded}
    if coded:
        back = norm_codes.decode(payload, base, others)
        assert all(torch.equal(back[name], near[name]) for name in near)
        assert norm_codes.encode(back, base) == (payload, coded)
    was, found = ({name: value.double() for name, value in each.items()} for each in (now, near))
    ulp = 2 * torch.finfo(dtype).eps if dtype != torch.float64 else 2**-22
    ratio = (found["x.running_var"] + EPSILON) / (was["x.running_var"] + EPSILON)
    assert bool(((ratio - 1).abs() <= 2**-8 + ulp).all())
    step = (found["x.running_var"] + EPSILON).sqrt() / 128
    off = (found["x.running_mean"] - was["x.running_mean"]).abs()
    assert bool((off <= 0.51 * step + ulp * was["x.running_mean"].abs()).all())


def test_means_that_have_no_variance_are_stored_as_they_are() -> None:
    base = {"x.running_mean": torch.zeros(3), "y.running_mean": torch.zeros(3), "y.running_var": torch.ones(4)}
    now = {name: value + 0.1 for name, value in base.items()}
    near = norm_codes.rounded(now, base)
    assert torch.equal(near["x.running_mean"], now["x.running_mean"])
    assert norm_codes.encode(near, base)[1] <= {"y.running_var"}
    refused(norm_codes.compressed(bytes(10)), base)


# ---- lies -----------------------------------------------------------------------------------------------------------


def test_streams_that_lie() -> None:
    base, _ = statistics(2)
    count = sum(value.numel() for value in base.values())
    assert same(norm_codes.decode(norm_codes.compressed(bytes(count)), base, {}), base)
    for length in (0, 1, count - 1, count + 1, 5 * count, 1 << 20):
        refused(norm_codes.compressed(bytes(length)), base)
    for payload in (
        b"",
        b"x" * 50,
        norm_codes.compressed(bytes(count))[:-1],
        norm_codes.compressed(bytes(count)) + b"x",
    ):
        refused(payload, base)
    refused(norm_codes.compressed(b"\xfe" * 4 * count), base)  # variances beyond float32
    refused(norm_codes.compressed(bytes(count)), base | {"a.running_var": torch.full((40,), torch.nan)})
    refused(norm_codes.compressed(b""), {})


def with_codes(edit: Any) -> bytes:
    file = smn.parse(masked_with(Tiny(), "dense").mask_bytes())
    edit(file)
    return smn.build(file)


def change(**fields: Any) -> Any:
    return lambda file: file.manifest["extensions"]["norm_codes"].update(fields)


LIES: dict[str, Any] = {
    "no codes": lambda file: file.tensors.pop(CODES),
    "no such extension": lambda file: file.manifest["extensions"].clear(),
    "more tensors": lambda file: file.tensors.update({"ext.norm_codes.more": ("U8", [1], b"x")}),
    "not required": change(required=False),
    "words": change(words={"bits": 7}),
    "numbers": lambda file: file.tensors.update({CODES: ("F32", [1], bytes(4))}),
    "too long": lambda file: file.with_payload(CODES, bytes(65)),
    "all are stored": lambda file: file.tensors.update(
        {f"norm.norm.running_{key}": ("F32", [8], bytes(32)) for key in ("mean", "var")}
    ),
    "statistics of the base": lambda file: file.manifest.update(norm_fingerprint="0" * 64),
    "a base that nobody checks": lambda file: file.manifest.update(base_fingerprint=None),
    "a bomb": lambda file: file.with_payload(
        CODES, lzma.compress(bytes(10**6), lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6}])[:64]
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie(lie: str) -> None:
    MaskedModel.from_pretrained(Tiny(), with_codes(lambda file: None))
    with pytest.raises(CorruptMaskFileError):
        MaskedModel.from_pretrained(Tiny(), with_codes(LIES[lie]))


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["adapt", "recalibrate", "anchored", "frozen"])
def test_what_is_measured_is_what_is_saved(norm: str) -> None:
    """In eval mode the model runs with the statistics of its file; those that training goes on from stay exact."""
    masked = masked_with(Tiny(), "large", norm=norm)
    if norm == "anchored":
        masked.anchor([images()])
    exact = masked.train()(images()) is not None and masked._norm.get_buffer("norm/running_var").clone()
    if norm in ("recalibrate", "anchored"):
        masked.recalibrate([images()])
        exact = masked._norm.get_buffer("norm/running_var").clone()
    vectors, data = masked.eval()(images()), masked.mask_bytes()
    again = MaskedModel.from_pretrained(Tiny(), data)
    assert torch.equal(again(images()), vectors)
    assert torch.equal(masked.view()(images()), vectors)
    assert torch.equal(masked.merge_and_unload().eval()(images()), vectors)
    assert again.mask_bytes() == masked.mask_bytes() == data
    assert torch.equal(masked._norm.get_buffer("norm/running_var"), exact)
    assert ("norm_codes" in inspect_mask_file(data)[0].extensions) == (norm != "frozen")


def test_training_after_a_measurement_is_seen() -> None:
    """Layers write to running statistics and leave no trace: what was rounded before must not be used again."""
    base = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True))  # counts no batches
    masked = get_masked_model(base)
    before = masked.eval()(images())
    masked.train()(images())
    after = masked.eval()(images())
    assert not torch.equal(before, after)
    assert torch.equal(MaskedModel.from_pretrained(base, masked.mask_bytes()).eval()(images()), after)


def test_converted_models_keep_what_they_would_have_saved() -> None:
    masked = masked_with(Tiny(), "large")
    masked.train()(images())
    again = MaskedModel.from_pretrained(Tiny(), masked.eval().mask_bytes())
    half = images().bfloat16()
    assert torch.equal(masked.to(torch.bfloat16)(half), again.to(torch.bfloat16)(half))
    assert "norm_codes" not in inspect_mask_file(masked.mask_bytes())[0].extensions


def test_a_loaded_mask_that_is_recalibrated_is_coded_again() -> None:
    loaded = MaskedModel.from_pretrained(Tiny(), masked_with(Tiny(), "large").mask_bytes())
    loaded.recalibrate([images()])
    data = loaded.mask_bytes()
    assert "norm_codes" in inspect_mask_file(data)[0].extensions
    assert torch.equal(MaskedModel.from_pretrained(Tiny(), data)(images()), loaded(images()))


def test_few_masked_weights_and_many_statistics() -> None:
    """Codes are bounded by the statistics they stand for, not by the masked weights as other extensions are."""
    base = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Conv2d(2, 3000, 1), nn.BatchNorm2d(3000))
    masked = get_masked_model(base, MaskConfig(select=["0.weight"]))
    x = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    masked.train()(x)
    data = masked.eval().mask_bytes()
    assert inspect_mask_file(data)[1]["norm"] > 1000
    assert torch.equal(MaskedModel.from_pretrained(base, data).eval()(x), masked(x))


def test_the_identity_takes_two_kilobytes() -> None:
    masked = get_masked_model(timm.create_model("resnet18", num_classes=0), MaskConfig(norm="anchored"))
    assert len(masked.mask_bytes()) < 2000
