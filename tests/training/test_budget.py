"""A budget of time becomes a number of steps, once, and measuring it leaves no trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from selfmask import adapt
from selfmask.errors import ConfigError, RunDamagedError
from selfmask.training.budget import LEAST_STEPS, Speed
from selfmask.training.config import seconds_of

from .small import HOW, Clothes, config, network


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("2m", 120), ("1.5h", 5400), ("1h30m", 5400), ("2d", 172800)]
)
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "2 m", "-2m", "0s", "2m!", "infh", "2w"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="budget is not a time"):
        seconds_of(text)


def test_only_one_of_steps_epochs_and_budget() -> None:
    with pytest.raises(ConfigError, match="one of steps, epochs and budget"):
        config(steps=5, budget="2m")
    changed = config(steps=5).changed(budget="2m")
    assert (changed.steps, changed.budget) == (None, "2m")
    assert changed.changed(epochs=2).budget is None


def test_steps_fill_the_time() -> None:
    speed = Speed(step=0.5, image=0.001)
    steps = speed.steps_within(600, images=1000)
    plan = speed.plan(steps, 1000, torch.zeros(25))
    assert 590 < plan["seconds"] <= 600
    assert speed.plan(steps + 1, 1000, ())["seconds"] - plan["seconds"] == pytest.approx(plan["seconds_per_step"])
    assert plan["disk_bytes"] == 200
    assert speed.steps_within(1, images=1000) == LEAST_STEPS


def test_measuring_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    measure = Speed.measure

    def watched(model: Any, *rest: Any) -> Speed:
        before = {key: value.clone() for key, value in model.state_dict().items()}
        speed = measure(model, *rest)
        after = model.state_dict()
        found.append(all(torch.equal(before[key], after[key]) for key in before))
        found.append(all(p.grad is None for p in model.parameters()))
        return speed

    monkeypatch.setattr(Speed, "measure", staticmethod(watched))
    result = adapt(network(), Clothes(), config(steps=30), preprocessing=HOW, report=False, dry_run=True)
    assert found == [True, True]
    assert result.result["steps"] == 30
    assert result.result["seconds"] > 0


def test_a_resumed_run_keeps_the_steps_that_its_budget_came_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([Speed(step=0.1, image=0.0), Speed(step=1e-6, image=0.0)])
    monkeypatch.setattr(Speed, "measure", staticmethod(lambda *_: next(speeds)))
    settings = config().changed(budget="6s", checkpoint_every=10)

    class StopError(Exception):
        pass

    def stop(_: Any, line: Any) -> None:
        if line["step"] == 20:
            raise StopError

    with pytest.raises(StopError):
        adapt(network(), Clothes(), settings, out=tmp_path / "run", preprocessing=HOW, report=False, watch=stop)
    begun = json.loads((tmp_path / "run" / "config.json").read_text())["facts"]["steps"]
    assert 40 <= begun < 60
    whole = (tmp_path / "run" / "config.json").read_text()
    for damaged in (whole.replace(f'"steps": {begun}', '"steps": "x"'), '{"facts": 3}'):
        (tmp_path / "run" / "config.json").write_text(damaged)
        with pytest.raises(RunDamagedError, match="does not say"):
            adapt(network(), Clothes(), settings, out=tmp_path / "run", resume=True, preprocessing=HOW, report=False)
    (tmp_path / "run" / "config.json").write_text(whole)
    done = adapt(network(), Clothes(), settings, out=tmp_path / "run", resume=True, preprocessing=HOW, report=False)
    assert done.result["steps"] == begun == done.log[-1]["step"]


def test_a_dry_run_leaves_nothing_behind(tmp_path: Path) -> None:
    adapt(network(), Clothes(), config(steps=9), out=tmp_path / "run", preprocessing=HOW, dry_run=True)
    assert not (tmp_path / "run").exists()
