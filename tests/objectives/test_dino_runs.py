"""DINO in whole runs: cut short and resumed, in two processes, begun with another run, and gone wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from selfmask import AdaptConfig, MaskConfig, adapt, get_masked_model
from selfmask.commands.adapt import AdaptResult
from selfmask.errors import InterruptedRunError
from selfmask.objectives.dino import DINO, DINOConfig
from selfmask.training import Guard
from selfmask.training.display import QuietDisplay
from selfmask.training.quality import Gain
from selfmask.training.start import Start
from tests.light import mostly_heavy

from ..processes import PROCESSES
from ..training.small import HOW, Clothes, config, network
from . import small

torch.set_num_threads(1)
SMALL = DINOConfig(hidden=24, bottleneck=16, out_dim=20, teacher_momentum=0.8, freeze_last_layer=0.2)


class Stopper(QuietDisplay):
    """Presses Ctrl-C when a step has been logged."""

    def __init__(self, step: int) -> None:
        self.step = step

    def line(self, line: Mapping[str, Any]) -> None:
        if line["step"] == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def run(out: Path | None = None, **options: Any) -> AdaptResult:
    changes = {name: options.pop(name) for name in list(options) if name not in ("resume", "display", "start")}
    settings = config(**{"objective": SMALL, "lr": 100.0, **changes})
    return adapt(network(dropout=0.1), Clothes(), settings, out=out, preprocessing=HOW, report=False, **options)


def checkpoint(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    return state


def assert_same(one: Any, other: Any) -> None:
    """To the bit, however deep."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@pytest.mark.parametrize("changes", [{}, {"mask": MaskConfig(norm="anchored"), "accumulate": 2, "per_tensor": True}])
@pytest.mark.parametrize("step", mostly_heavy([2, 6]))
def test_a_run_that_was_cut_short_ends_in_the_same_bits(tmp_path: Path, step: int, changes: dict[str, Any]) -> None:
    """Mask, log, and everything in the checkpoint; cut while the last layer is frozen, and later."""
    whole = run(tmp_path / "whole", **changes)
    with pytest.raises(InterruptedRunError):
        run(tmp_path / "cut", display=Stopper(step), **changes)
    resumed = run(tmp_path / "cut", resume=True, **changes)
    assert (tmp_path / "cut" / "mask.smn").read_bytes() == (tmp_path / "whole" / "mask.smn").read_bytes()
    assert [line["loss"] for line in resumed.log] == [line["loss"] for line in whole.log]
    assert len(resumed.log) == 12
    assert_same(checkpoint(tmp_path / "cut"), checkpoint(tmp_path / "whole"))
    assert whole.result["active"] < 1


def test_no_checkpoint_holds_the_base(tmp_path: Path) -> None:
    """Names, and numbers: nowhere in it is a tensor that the base has, too."""
    run(tmp_path / "run")
    state = checkpoint(tmp_path / "run")
    tensors = [*state["model"].values(), *state["objective"].values()]
    assert not any("base" in name for name in state["objective"])
    for name, weight in network().state_dict().items():
        if weight.dim() > 1:
            assert not any(torch.equal(weight, value) for value in tensors), name
    teacher, student = (
        {name: value for name, value in parts.items() if "scores." in name}
        for parts in (state["objective"], state["model"])
    )
    assert [value.shape for value in teacher.values()] == [value.shape for value in student.values()]
    assert not any(map(torch.equal, teacher.values(), student.values()))
    # What a run of SGD remembers of parameters that never had a gradient is nothing.
    heads = sum(name.startswith("head.") for name in state["objective"])
    assert len(state["optimizer"]["state"]) == len(student) + heads


def test_another_run_can_begin_with_its_heads(tmp_path: Path) -> None:
    run(tmp_path / "first")
    learned = checkpoint(tmp_path / "first")["objective"]
    start = Start.of(tmp_path / "first")
    begun = DINO(start.begin(network(dropout=0.1)), torch.zeros(16), SMALL, seed=5)
    assert start.heads(begun)
    state = begun.state_dict()
    for name in state:
        if not name.startswith("teacher."):
            assert torch.equal(state[name], learned[name]), name
    # The teacher begins with the student's scores.
    scores = checkpoint(tmp_path / "first")["model"]
    assert all(torch.equal(value, scores[f"scores.{name}"]) for name, value in begun.teacher.scores.items())
    assert run(tmp_path / "second", start=start).result["steps"] == 12


@pytest.mark.parametrize("preset", ["fast", "paper"])
def test_presets_take_it(preset: str) -> None:
    settings = AdaptConfig.preset(
        preset, objective="dino", steps=2, batch_size=8, size=16, log_every=1, quality_every=1, track=()
    )
    result = adapt(network(), Clothes(), settings, preprocessing=HOW)
    assert all(set(line) >= {"ln_k", "spread", "teacher_entropy", "kl", "teacher_momentum"} for line in result.log)
    assert len(result.log) == 2


# ---- collapse --------------------------------------------------------------------------------------------------


def test_the_guard_sees_that_images_have_become_alike() -> None:
    """One output wins everywhere, as it does without a centre: the loss is splendid, and the features are nothing."""
    objective = DINOConfig(hidden=24, bottleneck=16, out_dim=20, teacher_momentum=0.5, centre_momentum=1.0)
    result = run(
        objective=objective,
        steps=150,
        gate=True,
        quality_every=10,
        log_every=10,
        lr=1e-6,
        checkpoint_every=50,
        head_lr=1.0,
        mask=MaskConfig(norm="anchored"),
    )
    troubles = result.result["troubles"]
    assert "nearly the same vector" in troubles[0]["trouble"]
    assert result.log[-1]["step"] < 150


def test_the_guard_sees_outputs_that_say_nothing() -> None:
    """Targets without any temperature to speak of: all outputs become alike, and the loss is the chance level."""
    guard = Guard(lambda: torch.zeros(1, 1), lambda *_: Gain(0.0, 0.0, 0), every=10, looks=10)
    dino = DINO(nn.Identity(), torch.zeros(8), DINOConfig(out_dim=50, teacher_temperature_start=1e6, temperature=1e3))
    torch.manual_seed(0)
    found = []
    for step in range(10, 110, 10):
        loss, health = dino.loss(nn.Identity(), [torch.randn(6, 8) for _ in range(3)], 0.0)
        line = {"step": step, "loss": loss.item(), **{name: float(value) for name, value in health.numbers().items()}}
        found.append(guard.look(line, nn.Identity(), dict))
    assert found[0] is None
    assert "the chance level" in (found[-1] or "")


# ---- two processes -------------------------------------------------------------------------------------------


def _steps(mine: slice = slice(None)) -> dict[str, Tensor]:
    """Five steps of everything there is; gradients averaged over processes, as distributed training does."""
    model = get_masked_model(small.backbone(7))
    dino = DINO(model, torch.zeros(7), DINOConfig(hidden=9, bottleneck=6, out_dim=5, teacher_momentum=0.6))
    parameters = [*model.scores.parameters(), *dino.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    torch.manual_seed(2)
    losses = []
    for index in range(5):
        views = [3 * torch.randn(8, 3, 1, 1) + torch.randn(8, 3, side, side) for side in (8, 8, 4)]
        optimizer.zero_grad()
        dino.before_step(model, index / 5)
        loss, _ = dino.loss(model, [view[mine] for view in views], index / 5)
        loss.backward()
        losses.append(loss.detach().clone())
        dino.after_backward(model, index / 5)
        if dist.is_initialized():
            for tensor in [losses[-1], *(p.grad for p in parameters if p.grad is not None)]:
                dist.all_reduce(tensor)
                tensor /= dist.get_world_size()
        optimizer.step()
        dino.after_step(model, index / 5)
    return {**dino.state_dict(), "losses": torch.stack(losses)}


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(_steps(slice(rank * 4, (rank + 1) * 4)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.heavy
def test_two_processes_equal_one_with_all_images(tmp_path: Path) -> None:
    mp.start_processes(_process, (str(tmp_path),), nprocs=2, start_method=PROCESSES.get_start_method())
    expected = _steps()
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
