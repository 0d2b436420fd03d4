"""Files written by the first release of format version 1: every later release must read them to the same masks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from selfmask import MaskConfig, MaskedModel
from selfmask.maskfile import inspect_mask_file
from selfmask.preprocessing import Preprocessing

from . import smn
from .make_golden import FOLDER, GOLDEN, head, mask_of
from .tiny import Tiny, images, uniform

EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())


def load(name: str) -> MaskedModel:
    reference = GOLDEN[name].get("relative_to")
    relative_to = None if reference is None else FOLDER / f"{reference}.smn"
    return MaskedModel.from_pretrained(Tiny(), FOLDER / f"{name}.smn", relative_to=relative_to)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_file(name: str) -> None:
    """Loads, with the bits and outputs recorded when it was written."""
    masked, expected = load(name), EXPECTED[name]
    mask = masked.pack()
    assert mask.sha256 == expected["mask_sha256"]
    assert mask.fingerprint == expected["fingerprint"]
    assert masked.num_masked == expected["num_masked"]
    assert sum(mask.active.values()) == expected["active"]
    assert MaskConfig.from_dict(mask.config) == MaskConfig(**GOLDEN[name].get("config", {}))
    with torch.no_grad():
        outputs = masked(images())[:, :8]
    torch.testing.assert_close(outputs, torch.tensor(expected["outputs"]), atol=2e-5, rtol=2e-5)


def independent(name: str) -> dict[str, list[int]]:
    """The bits of a golden file, and its hashes checked, by the reader that shares no code with the library."""
    file = smn.parse((FOLDER / f"{name}.smn").read_bytes())
    manifest, base = file.manifest, Tiny()
    weights = {key: base.get_parameter(key).detach() for key in manifest["masks"]}
    parts = {key: ("float32", list(weight.shape), weight.numpy().tobytes()) for key, weight in weights.items()}
    assert {key: file.metadata[key] for key in ("format", "version")} == {"format": "selfmask", "version": "1"}
    assert smn.base_hash(parts) == EXPECTED[name]["fingerprint"] == manifest["fingerprint"]
    assert smn.content_hash(file.metadata["manifest"], file.tensors) == file.metadata["sha256"]
    magnitudes = {key: weight.abs().flatten().tolist() for key, weight in weights.items()}
    carry = {key: [all_[i] for i in smn.chosen(key, all_, manifest["config"])] for key, all_ in magnitudes.items()}
    coded = {key: (entry["codec"], file.tensors[f"mask.{key}"][2]) for key, entry in manifest["masks"].items()}
    bits = smn.decode(coded, file.tensors.get("lzma", ("U8", [0], b""))[2], carry)
    if manifest["relative_to"]:
        reference = independent(GOLDEN[name]["relative_to"])
        assert smn.mask_hash(reference) == manifest["relative_to"]
        same = {key: zip(values, reference[key], strict=True) for key, values in bits.items()}
        bits = {key: [1 - (a ^ b) for a, b in pairs] for key, pairs in same.items()}
    assert smn.mask_hash(bits) == EXPECTED[name]["mask_sha256"] == manifest["mask_sha256"]
    return bits


@pytest.mark.parametrize("name", GOLDEN)
def test_an_independent_reader_reads_it(name: str) -> None:
    """What `docs/format.md` says is what the files hold."""
    bits = independent(name)
    assert {key: smn.packed(values) for key, values in bits.items()} == {
        key: values.tobytes() for key, values in load(name).pack().bits.items()
    }


@pytest.mark.parametrize("name", [name for name, entry in GOLDEN.items() if entry["kind"] != "scores"])
def test_golden_bits_follow_their_formula(name: str) -> None:
    """The masks are known without the files and without the library."""
    base = Tiny()
    config = {"fraction": 1.0, "fraction_by": "random", **GOLDEN[name].get("config", {})}
    names = [key for key, _ in base.named_parameters() if not key.startswith("norm")]
    mask = load(name).pack()
    assert mask.bits.keys() == set(names)
    for i, key in enumerate(names):
        on = mask_of(GOLDEN[name]["kind"], key, i)
        places = smn.chosen(key, base.get_parameter(key).abs().flatten().tolist(), config)
        np.testing.assert_array_equal(np.unpackbits(mask.bits[key], count=len(places)), on[places])


def test_golden_words_and_head() -> None:
    mask = load("head").pack()
    assert mask.notes == 'Grüße 🐦 "quoted"\n'
    assert mask.base_name == "tiny.golden"
    assert mask.preprocessing == Preprocessing((9, 9), (0.1, 0.2, 0.3), (0.5, 0.25, 1 / 3), "bicubic")
    assert mask.head.keys() == head().keys()
    assert all(
        torch.equal(mask.head[key], value) and mask.head[key].dtype == value.dtype for key, value in head().items()
    )
    assert torch.equal(mask.norm["norm.running_mean"], torch.from_numpy(uniform(8, seed=90)).float())


def test_the_golden_files_cover_the_format() -> None:
    codecs = {codec for entry in EXPECTED.values() for codec in entry["codecs"]}
    assert codecs == {"raw", "rice", "lzma"}
    for name in ("raw", "rice", "lzma"):
        assert name in EXPECTED[name]["codecs"]
    manifests = {name: inspect_mask_file(FOLDER / f"{name}.smn")[0] for name in GOLDEN}
    assert manifests["relative"].relative_to == EXPECTED["raw"]["mask_sha256"]
    assert manifests["frozen"].norm_fingerprint
    rice = smn.parse((FOLDER / "rice.smn").read_bytes()).tensors["mask.conv2.weight"][2]
    assert rice[0] & 0x7F, "a rice code with classes by |w|"
    assert {path.stem for path in FOLDER.glob("*.smn")} == set(GOLDEN) == set(EXPECTED)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 60_000


def test_the_base_is_the_same_for_ever() -> None:
    """If this fails, the other failures of this file mean nothing: the base changed, not the reader."""
    weights = {key: w.detach() for key, w in Tiny().named_parameters() if not key.startswith("norm")}
    parts = {key: ("float32", list(w.shape), w.numpy().tobytes()) for key, w in weights.items()}
    assert smn.base_hash(parts) == EXPECTED["raw"]["fingerprint"]
