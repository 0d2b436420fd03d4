"""What `--precision auto` means: the same in all runs on a machine, and in a run that goes on elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from selfmask import adapt
from selfmask.errors import InterruptedRunError, RunDamagedError
from selfmask.training.precision import chosen, multiplies_bfloat16

from .small import HOW, Clothes, config, network
from .test_loop import Stopper, run, same

CPU = torch.device("cpu")
ABLE = {"avx512_bf16": True}


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that multiplies bfloat16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: ABLE)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")


def test_on_a_cpu_it_is_what_is_faster_there(able: None) -> None:
    plain, grouped = nn.Sequential(nn.Conv2d(4, 4, 3)), nn.Sequential(nn.Conv2d(4, 4, 3, groups=4))
    assert [chosen("auto", model, CPU) for model in (plain, grouped)] == ["bfloat16", "float32"]
    assert [chosen(given, grouped, CPU) for given in ("float32", "bfloat16")] == ["float32", "bfloat16"]  # as asked for
    mixed = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(4, 64))
    assert chosen("auto", mixed, CPU) == "bfloat16"  # a transformer with some grouped convolutions


@pytest.mark.parametrize(
    ("capabilities", "told", "expected"),
    [
        ({"avx512_bf16": True}, None, True),
        ({"amx_bf16": True}, "AVX512_CORE_AMX", True),
        ({"avx512_bf16": False, "amx_bf16": False}, None, False),
        ({}, None, False),
        ({"avx512_bf16": True}, "avx512_core", False),
        ({"avx512_bf16": True}, "AVX2", False),
        ({"avx512_bf16": True}, "avx512_core_bf16", True),
    ],
)
def test_instructions_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], told: str | None, expected: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    if told is None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    else:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", told)
    assert multiplies_bfloat16() == expected
    assert chosen("auto", network(), CPU) == ("bfloat16" if expected else "float32")


def test_an_older_torch_that_cannot_tell_means_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not multiplies_bfloat16()


def precision_of(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["facts"]["precision"])


def test_a_run_goes_on_with_what_it_began_with_on_another_machine(
    tmp_path: Path, able: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole")
    assert precision_of(tmp_path / "whole") == "bfloat16"
    with pytest.raises(InterruptedRunError):
        run(tmp_path / "moved", display=Stopper(6))
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    moved = run(tmp_path / "moved", resume=True)
    assert precision_of(tmp_path / "moved") == "bfloat16"
    assert same(whole, moved)
    assert not same(whole, run(tmp_path / "exact"))  # which is another run on such a machine
    assert precision_of(tmp_path / "exact") == "float32"


def test_a_folder_that_does_not_say_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        run(tmp_path / "run", display=Stopper(6))
    file = tmp_path / "run" / "config.json"
    content = json.loads(file.read_text())
    content["facts"]["precision"] = "auto"
    file.write_text(json.dumps(content))
    with pytest.raises(RunDamagedError, match="what the run computes with"):
        run(tmp_path / "run", resume=True)


def test_a_budget_is_measured_with_what_the_run_computes_with(able: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[torch.dtype] = []
    model = network()
    model.register_forward_hook(lambda *_: kinds.append(_[2].dtype))
    plan = adapt(model, Clothes(), config(steps=None, budget="2s"), preprocessing=HOW, dry_run=True).result
    assert plan["steps"] >= 40
    assert torch.bfloat16 in kinds
