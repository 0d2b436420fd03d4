"""Files written by the first release of each format version: every later one must read them to the same masks."""

from __future__ import annotations

import json
import struct
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from selfmask import MaskConfig, MaskedModel
from selfmask.errors import BaseWarning, WrongBaseError
from selfmask.maskfile import inspect_mask_file
from selfmask.preprocessing import Preprocessing

from . import smn
from .make_golden import FOLDERS, GOLDEN, SHARE, head, mask_of
from .tiny import Tiny, images, uniform

EXPECTED: dict[str, dict[str, Any]] = {
    version: json.loads((folder / "expected.json").read_text()) for version, folder in FOLDERS.items()
}
each = pytest.mark.parametrize(("version", "name"), [(version, name) for version in FOLDERS for name in GOLDEN])


def load(version: str, name: str, base: Tiny | None = None) -> MaskedModel:
    reference = GOLDEN[name].get("relative_to")
    folder = FOLDERS[version]
    relative_to = None if reference is None else folder / f"{reference}.smn"
    with warnings.catch_warnings():
        if version == "1":
            warnings.simplefilter("ignore", BaseWarning)
        return MaskedModel.from_pretrained(base or Tiny(), folder / f"{name}.smn", relative_to=relative_to)


@each
def test_golden_file(version: str, name: str) -> None:
    """Loads, with the bits and outputs recorded when it was written."""
    masked, expected = load(version, name), EXPECTED[version][name]
    mask = masked.pack()
    assert mask.sha256 == expected["mask_sha256"]
    assert mask.fingerprint == expected["fingerprint"]
    assert mask.base_fingerprint == expected.get("base_fingerprint")
    assert masked.num_masked == expected["num_masked"]
    assert sum(mask.active.values()) == expected["active"]
    assert MaskConfig.from_dict(mask.config) == MaskConfig(**GOLDEN[name].get("config", {}))
    if "norm" in expected:  # every machine decodes the same bits
        assert {key: value.numpy().tobytes().hex() for key, value in mask.norm.items()} == expected["norm"]
    with torch.no_grad():
        outputs = masked(images())[:, :8]
    torch.testing.assert_close(outputs, torch.tensor(expected["outputs"]), atol=2e-5, rtol=2e-5)


def independent(version: str, name: str) -> dict[str, list[int]]:
    """The bits of a golden file, and its hashes checked, by the reader that shares no code with the library."""
    file = smn.parse((FOLDERS[version] / f"{name}.smn").read_bytes())
    manifest, base, expected = file.manifest, Tiny(), EXPECTED[version][name]
    weights = {key: base.get_parameter(key).detach() for key in manifest["masks"]}
    parts = {key: ("float32", list(weight.shape), weight.numpy().tobytes()) for key, weight in weights.items()}
    assert {key: file.metadata[key] for key in ("format", "version")} == {"format": "selfmask", "version": version[0]}
    assert smn.base_hash(parts) == expected["fingerprint"] == manifest["fingerprint"]
    words = smn.hashed(file.metadata, file.metadata["manifest"])
    assert smn.content_hash(words, file.stored) == file.metadata["sha256"]
    if version != "1":
        state = {key: value for key, value in base.state_dict().items() if not key.endswith("num_batches_tracked")}
        whole = {key: ("float32", list(value.shape), value.numpy().tobytes()) for key, value in state.items()}
        assert smn.base_hash(whole) == expected["base_fingerprint"] == manifest["base_fingerprint"]
        assert (manifest["base_tensors"], manifest["tables_fingerprint"]) == (len(state), None)
    if "norm_codes" in manifest.get("extensions", {}):
        own = {key: value.tolist() for key, value in base.state_dict().items() if "running_" in key}
        statistics = smn.statistics(file.tensors["ext.norm_codes.codes"][2], own)
        packed = {key: struct.pack(f"<{len(values)}f", *values).hex() for key, values in statistics.items()}
        assert packed == expected["norm"]
    magnitudes = {key: weight.abs().flatten().tolist() for key, weight in weights.items()}
    carry = {key: [all_[i] for i in smn.chosen(key, all_, manifest["config"])] for key, all_ in magnitudes.items()}
    coded = {key: (entry["codec"], file.tensors[f"mask.{key}"][2]) for key, entry in manifest["masks"].items()}
    bits = smn.decode(coded, file.tensors.get("lzma", ("U8", [0], b""))[2], carry)
    if manifest["relative_to"]:
        reference = independent(version, GOLDEN[name]["relative_to"])
        assert smn.mask_hash(reference) == manifest["relative_to"]
        same = {key: zip(values, reference[key], strict=True) for key, values in bits.items()}
        bits = {key: [1 - (a ^ b) for a, b in pairs] for key, pairs in same.items()}
    assert smn.mask_hash(bits) == expected["mask_sha256"] == manifest["mask_sha256"]
    return bits


@each
def test_an_independent_reader_reads_it(version: str, name: str) -> None:
    """What `docs/format.md` says is what the files hold."""
    bits = independent(version, name)
    assert {key: smn.packed(values) for key, values in bits.items()} == {
        key: values.tobytes() for key, values in load(version, name).pack().bits.items()
    }


@pytest.mark.parametrize("name", [name for name, entry in GOLDEN.items() if entry["kind"] != "scores"])
@pytest.mark.parametrize("version", FOLDERS)
def test_golden_bits_follow_their_formula(version: str, name: str) -> None:
    """The masks are known without the files and without the library."""
    base = Tiny()
    config = {"fraction": 1.0, "fraction_by": "random", **GOLDEN[name].get("config", {})}
    names = [key for key, _ in base.named_parameters() if not key.startswith("norm")]
    mask = load(version, name).pack()
    assert mask.bits.keys() == set(names)
    for i, key in enumerate(names):
        on = mask_of(GOLDEN[name]["kind"], key, i)
        places = smn.chosen(key, base.get_parameter(key).abs().flatten().tolist(), config)
        np.testing.assert_array_equal(np.unpackbits(mask.bits[key], count=len(places)), on[places])


@pytest.mark.parametrize("version", FOLDERS)
def test_golden_words_and_head(version: str) -> None:
    mask = load(version, "head").pack()
    assert mask.notes == 'Grüße 🐦 "quoted"\n'
    assert mask.base_name == "tiny.golden"
    assert mask.preprocessing == Preprocessing((9, 9), (0.1, 0.2, 0.3), (0.5, 0.25, 1 / 3), "bicubic")
    assert mask.head.keys() == head().keys()
    assert all(
        torch.equal(mask.head[key], value) and mask.head[key].dtype == value.dtype for key, value in head().items()
    )
    mean, spread = torch.from_numpy(uniform(8, seed=90)).float(), mask.norm["norm.running_var"].sqrt()
    assert bool(((mask.norm["norm.running_mean"] - mean).abs() <= (0.51 / 128 if version == "2" else 0) * spread).all())
    assert {name: each.words for name, each in mask.extensions.items()} == ({} if version == "1" else {"share": SHARE})


@pytest.mark.parametrize("version", FOLDERS)
def test_the_golden_files_cover_the_format(version: str) -> None:
    expected, folder = EXPECTED[version], FOLDERS[version]
    codecs = {codec for entry in expected.values() for codec in entry["codecs"]}
    assert codecs == {"raw", "rice", "lzma"}
    for name in ("raw", "rice", "lzma"):
        assert name in expected[name]["codecs"]
    manifests = {name: inspect_mask_file(folder / f"{name}.smn")[0] for name in GOLDEN}
    assert {manifest.version for manifest in manifests.values()} == {version[0]}
    assert {manifest.joined for manifest in manifests.values()} == {version == "2"}
    coded = {name for name, manifest in manifests.items() if "norm_codes" in manifest.extensions}
    assert coded == (set(GOLDEN) - {"frozen"} if version == "2" else set())
    assert manifests["relative"].relative_to == expected["raw"]["mask_sha256"]
    assert manifests["frozen"].norm_fingerprint
    rice = smn.parse((folder / "rice.smn").read_bytes()).tensors["mask.conv2.weight"][2]
    assert rice[0] & 0x7F, "a rice code with classes by |w|"
    assert {path.stem for path in folder.glob("*.smn")} == set(GOLDEN) == set(expected)
    assert sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) < 60_000


def test_the_base_is_the_same_for_ever() -> None:
    """If this fails, the other failures of this file mean nothing: the base changed, not the reader."""
    weights = {key: w.detach() for key, w in Tiny().named_parameters() if not key.startswith("norm")}
    parts = {key: ("float32", list(w.shape), w.numpy().tobytes()) for key, w in weights.items()}
    assert smn.base_hash(parts) == EXPECTED["1"]["raw"]["fingerprint"]


# ---- what version 1 does not check ------------------------------------------------------------------------------


def elsewhere() -> Tiny:
    """The right masked weights, and another norm layer."""
    base = Tiny()
    with torch.no_grad():
        base.norm.weight.add_(0.25)
    return base


def test_version_1_says_what_was_not_checked() -> None:
    with pytest.warns(BaseWarning, match=r"only the 5 masked tensors .* not the other 4 \(norm layers"):
        MaskedModel.from_pretrained(elsewhere(), FOLDERS["1"] / "raw.smn")
    with pytest.raises(WrongBaseError, match="another beside them"):
        load("2", "raw", elsewhere())


def test_version_1_is_verified_as_before() -> None:
    for version in FOLDERS:
        with pytest.raises(WrongBaseError, match="other weights"):
            load(version, "raw", Tiny(seed=1))
    other = Tiny()
    with torch.no_grad():
        other.norm.running_mean.add_(1)
    for version in FOLDERS:  # a mask that keeps the base's statistics
        with pytest.raises(WrongBaseError, match="batch-norm statistics"):
            load(version, "frozen", other)


def test_a_mask_of_version_1_that_is_saved_again_claims_no_more_than_it_did() -> None:
    """What the base was beside the masked weights is known no better for being written anew."""
    data = load("1", "raw").mask_bytes()
    assert inspect_mask_file(data)[0].version == "2"
    with pytest.warns(BaseWarning, match="could be checked"):
        MaskedModel.from_pretrained(elsewhere(), data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BaseWarning)
        trained = MaskedModel.from_pretrained(Tiny(), FOLDERS["1"] / "raw.smn", is_trainable=True)
    assert trained.pack().base_fingerprint == EXPECTED["2"]["raw"]["base_fingerprint"]
