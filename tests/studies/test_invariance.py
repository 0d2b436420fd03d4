"""The study of invariance: masks that are equal to the last bit, or but for what rounding explains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from selfmask.backbones import load_backbone
from selfmask.commands.train import TrainConfig, train
from selfmask.data.partition import open_labelled
from selfmask.masking import MaskedModel
from selfmask.studies.catalogue import STUDIES
from selfmask.studies.invariance import PAIRS, SETTINGS, Beside, alike, by_epoch
from selfmask.studies.numbers import find
from selfmask.studies.output import lines_of, write
from selfmask.studies.runner import run_study
from selfmask.studies.scale import Scale
from selfmask.studies.tasks import Train

from .few import few_clothes, short, small_scale, tasks_in, without_entry

__all__ = ["short"]
STUDY = STUDIES["invariance"]


def settings_of(run: Train) -> tuple[float | None, float, float]:
    return run.config.lr, run.config.mask.s0, run.config.mask.mu


def test_settings_are_those_of_the_paper() -> None:
    entries = STUDY.entries(Scale("paper"))
    runs = {entry.setting: entry.task.of for entry in entries if isinstance(entry.task, Beside)}
    # Nothing is said of the rate: it is that of masks in the paper, and the run is that of Table 1.
    assert settings_of(runs["standard"]) == (None, 1.0, 0.0)
    assert runs["standard"].config.resolved(torch.nn.Identity()).lr == 50.0
    assert settings_of(runs["rate 100 and scores 2.5 and threshold 0.5"]) == (100.0, 2.5, 0.5)
    assert settings_of(runs["rate 100"]) == (100.0, 1.0, 0.0)
    assert settings_of(runs["scores 2.0"]) == (None, 2.0, 0.0)
    assert settings_of(runs["threshold 0.5"]) == (None, 1.0, 0.5)
    assert settings_of(runs["rate 100 and scores 2.0"]) == (100.0, 2.0, 0.0)
    assert settings_of(runs["rate 25 and scores 0.5"]) == (25.0, 0.5, 0.0)
    assert {run.subject.data for run in runs.values()} == {"cifar10"}
    supervised = {entry.task for entry in STUDIES["supervised"].entries(Scale("paper"))}
    assert runs["standard"] in supervised
    assert without_entry("invariance", curves=True) == set()


def learned(data: str, steps: int, **changes: Any) -> MaskedModel:
    """A mask after a few steps; the short warm-up lets scores reach the threshold."""
    config = TrainConfig.preset("paper", steps=steps, batch_size=8, warmup=0.0, track=())
    mask = config.mask.changed(**changes.pop("mask", {}))
    images, _ = open_labelled(data)
    model = load_backbone("selfmask/tiny")
    result = train(model.model, images, config.changed(mask=mask, **changes), preprocessing=model.preprocessing)
    assert isinstance(result.model, MaskedModel)
    return result.model


def test_scaled_by_powers_of_two_masks_are_equal_bit_for_bit(tmp_path: Path) -> None:
    data = few_clothes(tmp_path / "few.npz")
    one, *others = (learned(data, 6, lr=scale * 1000.0, mask={"s0": scale * 1.0}).pack() for scale in (1, 2, 0.5))
    assert 0.2 < sum(one.active.values()) / sum(one.sizes.values()) < 0.99
    for other in others:
        assert other.sha256 == one.sha256
        assert one.bits_apart(other) == 0
        for name, value in one.norm.items():
            assert torch.equal(value, other.norm[name])


def test_half_the_way_to_the_threshold_is_twice_the_rate_but_for_rounding(tmp_path: Path) -> None:
    data = few_clothes(tmp_path / "few.npz")
    faster = learned(data, 4, lr=2000.0)
    higher = learned(data, 4, lr=1000.0, mask={"mu": 0.5})
    changed = learned(data, 4, lr=1000.0)
    one, other = faster.pack(), higher.pack()
    # Rounded at every step to a part in 2^24 of numbers up to the largest score.
    apart, near = 0, 0
    for a, b in zip(faster.scores.state_dict().values(), higher.scores.state_dict().values(), strict=True):
        unit = 4 * 2.0**-23 * max(float(a.abs().max()), 1.0)
        close = (a.abs() < unit) | ((b - 0.5).abs() < unit)
        differ = (a > 0) != (b > 0.5)
        apart, near = apart + int(differ.sum()), near + int(close.sum())
        assert not bool((differ & ~close).any())
    assert one.bits_apart(other) == apart <= near
    assert one.bits_apart(changed.pack()) > 1000 * max(apart, 1)


def test_losses_are_placed_by_the_papers_epochs() -> None:
    log = [{"step": step, "loss": float(step)} for step in range(10, 601, 10)]
    found = by_epoch(log, 600, 10)  # an epoch of the paper is four steps
    assert list(found) == [str(epoch) for epoch in range(10, 151, 10)]
    assert found["10"] == 25.0  # of 10, 20, 30 and 40
    assert found["150"] == 585.0
    assert by_epoch([{"step": 7, "loss": 2.0}], 300, 1) == {"4": 2.0}


def test_how_long_runs_are_alike() -> None:
    one = [{"step": step, "loss": 1 / step} for step in range(10, 101, 10)]
    other = [{"step": step, "loss": 1 / step + (step > 40) * 1e-16} for step in range(10, 101, 10)]
    assert alike(one, other, 100) == 150 * 40 / 100
    assert alike(one, one, 100) == 150
    assert alike(one[1:], other, 100) == 0


def test_a_run_beside_another(tmp_path: Path, short: None) -> None:
    scale, tasks = small_scale(tmp_path), tasks_in(tmp_path)
    task = next(e.task for e in STUDY.entries(scale) if e.setting == "rate 100 and scores 2.0")
    assert isinstance(task, Beside)
    tasks.run_all([task.of, task.other, task])
    log = (tasks.place(task.of) / "log.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in log]
    expected = {"bits_apart": 0, "share_apart": 0, "epochs_alike": 150.0, "losses": {"80": losses[0], "150": losses[1]}}
    assert tasks.result(task) == expected


@pytest.mark.heavy
def test_a_small_study_compares_masks_and_losses(tmp_path: Path, short: None) -> None:
    found = run_study(STUDY, small_scale(tmp_path), tasks_in(tmp_path))
    assert not found.missing
    values = {(e.setting, e.measure, e.x): value for e, value in found.values.items()}
    for setting, other in PAIRS[:2]:
        assert values[f"{setting} against {other}", "bits_apart", None] == 0
        assert values[setting, "loss", 150.0] == values[other, "loss", 150.0]
    assert {e.setting for e in found.values if e.measure == "loss"} == set(SETTINGS)
    assert all(value >= 0 for value in values.values())
    lines = {(line.setting, line.measure, line.x): line for line in lines_of(found)}
    assert ("standard", "loss", 80.0) in lines  # the first of two steps
    files = write(found, tmp_path / "results")
    assert [file.name for file in files] == ["invariance.csv", "invariance.md", "invariance.html", "invariance.svg"]


@pytest.mark.parametrize("setting", ["standard", "rate 100"])
def test_losses_stand_beside_the_papers(setting: str) -> None:
    """The standard run is drawn twice there, with the same numbers."""
    assert find("invariance", backbone="", setting=setting, data="cifar10", measure="loss", x=1.0) == 2.305828332901
