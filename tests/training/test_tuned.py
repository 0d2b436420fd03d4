"""Files of tuned weights: what they say is checked before any memory is asked for."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from selfmask import MaskConfig
from selfmask.errors import BadWeightsError, BaseWarning, WrongBaseError
from selfmask.maskfile import Fingerprints, state_of
from selfmask.objectives.heads import LinearHead
from selfmask.preprocessing import IMAGENET
from selfmask.training.methods import MethodName, prepare
from selfmask.training.tuned import About, load_tuned, open_tuned, write_tuned

from ..maskfile import smn


def base() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 16)).eval()


def write(path: Path, method: MethodName) -> None:
    model = base()
    fingerprint = Fingerprints().of(state_of(model).stored)
    learner = prepare(model, method, MaskConfig(), 4)
    with torch.no_grad():
        for parameter in learner.parameters:
            parameter.add_(0.5)
    about = About(method, "selfmask/tiny", fingerprint, IMAGENET, 4, learner.targets)
    write_tuned(path, learner, LinearHead(16, ["a", "b"]), about)


@cache
def written(method: MethodName) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "a.safetensors", method)
        return (Path(folder) / "a.safetensors").read_bytes()


Edit = Callable[[dict[str, Any], dict[str, smn.Part]], None]


def edited(method: MethodName, edit: Edit, version: str | None = "2") -> bytes:
    """The file with another `about` or other tensors, and the hash that belongs to them."""
    made = smn.parse(written(method), "about")
    edit(made.manifest, made.tensors)
    metadata = {"format": "selfmask-tuned", **({} if version is None else {"version": version})}
    text = json.dumps(made.manifest)
    words = {"about": text, "sha256": smn.content_hash(smn.hashed(metadata, text), made.tensors)}
    return smn.assemble({**metadata, **words}, made.tensors)


def setting(**values: Any) -> Edit:
    return lambda about, tensors: about.update(values)


def refused(data: bytes, match: str = ".") -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadWeightsError, match=match):
            load_tuned(base(), data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("method", ["full", "linear", "lora", "bitfit"])
def test_what_was_written_is_read(method: MethodName) -> None:
    model, head = load_tuned(base(), written(method))
    assert head.classes == ["a", "b"]
    assert model(torch.zeros(2, 3, 3, 3)).shape == (2, 16)
    load_tuned(base(), edited(method, lambda about, tensors: None))


@pytest.mark.parametrize("rank", [5, 2**15, 10**9, -1, 0, 4.0, True, "4", None])
def test_a_rank_that_the_file_does_not_hold(rank: Any) -> None:
    """One of 1.7 kB took 9.3 GB."""
    refused(edited("lora", setting(rank=rank)))


def test_a_rank_larger_than_any_side_of_its_layers() -> None:
    def edit(about: dict[str, Any], tensors: dict[str, smn.Part]) -> None:
        about["rank"] = 128
        for name, (dtype, shape, data) in list(tensors.items()):
            if "lora_A" in name:
                tensors[name] = (dtype, [128, *shape[1:]], data * 32)
            elif "lora_B" in name:
                tensors[name] = (dtype, [shape[0], 128, *shape[2:]], data * 32)

    refused(edited("lora", edit), "does not fit its backbone")


@pytest.mark.parametrize(
    "edit",
    [
        setting(targets=[]),
        setting(targets=["9"]),
        setting(targets=["4", "9"]),
        setting(targets=["2"]),
        setting(targets="4"),
        setting(targets=[4]),
        setting(targets=["x"] * 20_000),
        setting(method="magic"),
        setting(fingerprint="abc"),
        setting(base_name=5),
        setting(preprocessing=None),
        setting(preprocessing={"size": [2, 2], "mean": [0] * 3, "std": [0] * 3, "interpolation": "bilinear"}),
        setting(preprocessing=[["size", 3]]),
        setting(extensions={"x": {"version": 1, "required": True, "words": None}}),
        setting(extensions=None),
        lambda about, tensors: about.clear(),
        lambda about, tensors: tensors.pop("weight.4.lora_A.default.weight"),
        lambda about, tensors: tensors.update({"weight.new": ("F32", [1], bytes(4))}),
        lambda about, tensors: tensors.update({"other": ("F32", [1], bytes(4))}),
        lambda about, tensors: tensors.update({"weight.1.bias": ("F32", [8], b"\xff" * 32)}),
    ],
)
def test_what_does_not_fit(edit: Edit) -> None:
    refused(edited("lora", edit))


def test_the_content_is_guarded_by_a_hash() -> None:
    data = written("full")
    for at in (-1, -40, len(data) // 2):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(BadWeightsError):
            open_tuned(bytes(damaged))
    refused(edited("full", lambda about, tensors: None, version="3"), "this release can read")


def test_files_of_the_first_release_say_that_they_were_not_checked() -> None:
    def old(about: dict[str, Any], tensors: dict[str, smn.Part]) -> None:
        del about["extensions"]
        about["fingerprint"] = Fingerprints().of(base().state_dict())

    with pytest.warns(BaseWarning, match="no hash"):
        load_tuned(base(), edited("full", old, version=None))


def test_the_whole_backbone_counts_but_its_counters() -> None:
    model = base()
    model[1].num_batches_tracked.add_(5)
    load_tuned(model, written("lora"))
    model = base()
    model[1].running_mean.add_(1)
    with pytest.raises(WrongBaseError):
        load_tuned(model, written("lora"))


def test_a_header_is_bounded(tmp_path: Path) -> None:
    header = b"{" + b" " * (9 << 20) + b"}"
    refused(len(header).to_bytes(8, "little") + header, "too large")
