"""Every run of every study at the paper's scale, against what the paper and its code say: typed here, not imported."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from selfmask.objectives.swav import SwAVConfig
from selfmask.settings import leaves
from selfmask.studies.catalogue import STUDIES
from selfmask.studies.runner import in_order
from selfmask.studies.scale import Scale
from selfmask.studies.tasks import Adapt, Cascade, Measure, Subject, Task, Train

from .few import few_clothes, tasks_in

SELF_SUPERVISED = {
    "method": "mask",
    "epochs": None,  # 150, where nothing is said
    "steps": None,
    "batch_size": 64,
    "momentum": 0.9,
    "warmup": 0.0,
    "lr": 50.0,
    "head_lr": 0.15,
    "weight_decay": 1e-6,
    "per_tensor": False,
    "gate": False,
    "heads_first": 0.0,
    "mask.rule": "threshold",
    "mask.mu": 0.0,
    "mask.s0": 1.0,
    "mask.score_init": "constant",
    "mask.select": "paper",
    "mask.fraction": 1.0,
    "mask.norm": "adapt",
    "mask.detach_alpha": False,
    "mask.alpha_of": "projection",
    "objective.projection": 128,
    "objective.prototypes": 500,
    "objective.temperature": 0.1,
    "objective.epsilon": 0.05,
    "objective.iterations": 3,
    "objective.queue_start": 30 / 150,
    "objective.freeze_steps": 5005,
    "objective.heads": "random",
    "views.large": 2,
    "views.size": 224,
    "views.large_scale": [0.14, 1.0],
    "views.small": 6,
    "views.small_size": 96,
    "views.small_scale": [0.05, 0.14],
    "views.flip_p": 0.5,
    "views.jitter": [0.8, 0.8, 0.8, 0.2],
    "views.jitter_p": 0.8,
    "views.grey_p": 0.2,
    "views.blur_p": 0.5,
    "views.blur_sigma": [0.1, 2.0],
    "views.solarise_p": 0.0,
}
SUPERVISED = {
    "method": "mask",
    "epochs": 150,
    "batch_size": 64,
    "momentum": 0.9,
    "head": "linear",
    "head_start": "random",
    "follow": "paper",
    "lr": None,
    "warmup": None,
    "weight_decay": None,
    "label_fraction": 1.0,
    "mask.mu": 0.0,
    "mask.s0": 1.0,
    "mask.rule": "threshold",
    "mask.select": "paper",
    "mask.norm": "adapt",
    "views.large": 1,
    "views.small": 0,
    "views.large_scale": [1.0, 1.0],
    "views.jitter": [0.4, 0.4, 0.4, 0.4],
    "views.jitter_p": 0.8,
    "views.grey_p": 0.2,
    "views.solarise_p": 0.2,
    "views.flip_p": 0.5,
    "views.blur_p": 0.0,
}
CLIP = {"head": "clip-text", "epochs": 32, "mask.select": "paper-vit"}

# What a study changes, and only that: the settings, with all values that they take.
TOPK = {"mask.rule": {"threshold", "topk"}, "mask.score_init": {"constant", "kaiming"}}
CHANGES: dict[str, dict[str, set[Any]]] = {
    "rules": TOPK,
    "progressive": {
        "mask.rule": {"threshold", "topk", "progressive_topk"},
        "mask.score_init": {"constant", "kaiming"},
        "mask.share_every": {"step", "epoch"},
    },
    "low-shot": {
        "method": {"mask", "full"},
        "stratified": {False},
        "label_fraction": {0.0025, 0.005, 0.01, 0.02, 0.04, 0.1, 0.05, 0.06, 0.07, 0.08, 0.09},
    },
    "supervised": {"method": {"mask", "full"}},
    "ablations": {
        "objective.prototypes": {50, 500, 5000},
        "mask.select": {"paper", "all"},
        "mask.exclude": {(), ("*bias",)},
    },
    "selective": {
        "mask.seed": {0},
        "mask.fraction": {0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0}
        | {count / 23_462_592 for count in (213_504, 1_426_944, 8_506_880)},
        "mask.fraction_by": {"random", "magnitude"},
        "mask.select": {"paper", "stages:1-1", "stages:1-2", "stages:1-3", "stages:1-4"},
    },
    "cascade": {"epochs": {None, 54.0}},
    "variance": {},
    "cost": {"method": {"mask", "full"}, "lr": {50.0, 0.15, None}},
}
DATA = {
    "supervised": "cifar10 cifar100 dtd eurosat flowers102 oxfordiiitpet sun397 ucf101",
    "rules": "cifar10 cifar100 dtd eurosat flowers102 sun397 ucf101",
    "low-shot": "cifar10 cifar100 sun397",
    "cascade": "cifar100 inatloc500",
    "ablations": "cifar10 dtd sun397",
    "progressive": "dtd eurosat flowers102 ucf101",
    "selective": "cifar10 cifar100",
    "variance": "dtd ucf101",
}


def tasks_of(name: str) -> list[Task]:
    return list(in_order(entry.task for entry in STUDIES[name].entries(Scale("paper"))))


def settings(task: Adapt | Train) -> dict[str, Any]:
    return {".".join(path): value for path, value in leaves(task.config.to_dict())}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_all_runs_are_set_up_as_the_paper_says(name: str) -> None:
    seen: dict[str, set[Any]] = {}
    for task in tasks_of(name):
        if isinstance(task, Cascade):
            assert (task.config.experts, task.config.router, task.config.components) == (5, "gmm", 20)
            assert task.config.expert_images == 50_000 * 150
        if not isinstance(task, Adapt | Train):
            continue
        found = settings(task)
        expected = SELF_SUPERVISED if isinstance(task, Adapt) else SUPERVISED
        if found.get("head") == "clip-text":
            expected = {**expected, **CLIP}
        for key in found:
            if key in CHANGES[name]:
                value = found[key]
                seen.setdefault(key, set()).add(tuple(value) if isinstance(value, list | tuple) else value)
            elif key in expected:
                value = list(found[key]) if isinstance(found[key], tuple) else found[key]
                assert value == expected[key], (task.title, key)
        assert set(expected) <= set(found) | {"mask.exclude"}
    assert {key: seen[key] for key in CHANGES[name]} == CHANGES[name]


@pytest.mark.parametrize("name", sorted(DATA))
def test_the_papers_data_and_backbones(name: str) -> None:
    subjects = {task.subject for task in tasks_of(name)}
    assert {subject.data for subject in subjects} == set(DATA[name].split())
    backbones = {subject.backbone for subject in subjects}
    if name == "supervised":
        assert backbones == {"resnet18", "swav/resnet50", "open_clip/ViT-B-32:openai"}
    elif name == "ablations":
        assert backbones == {"swav/resnet50", "dino/resnet50", "resnet50"}
    else:
        assert backbones == {"swav/resnet50"}


def test_variance_has_five_runs() -> None:
    for data in ("dtd", "ucf101"):
        runs = [task for task in tasks_of("variance") if isinstance(task, Adapt) and task.subject.data == data]
        assert [task.config.seed for task in runs] == [0, 1, 2, 3, 4]


def test_top_k_takes_the_share_that_the_threshold_found() -> None:
    for name in ("rules", "progressive"):
        for task in tasks_of(name):
            if isinstance(task, Adapt) and task.share_of is not None:
                assert isinstance(task.share_of, Adapt)
                assert task.share_of.config.mask.rule == "threshold"
                assert task.share_of.subject == task.subject
                assert task.share_of.config.seed == task.config.seed


def test_measures_are_of_the_runs_and_of_the_frozen_backbones() -> None:
    for name in STUDIES:
        for task in tasks_of(name):
            if isinstance(task, Measure) and task.of is not None:
                assert task.of.subject == task.subject


def miniature(task: Adapt | Train | Cascade, subject: Subject) -> Adapt | Train | Cascade:
    """The same run on a network and images that are small, and only its first steps."""
    short: dict[str, Any] = {"steps": 3, "batch_size": 8, "size": 32, "log_every": 1, "checkpoint_every": 3}
    if isinstance(task, Cascade):
        adapt = miniature(task.dispatcher, subject)
        assert isinstance(adapt, Adapt)
        shape = dataclasses.replace(task.config, components=4, expert_images=None, adapt=adapt.config)
        return Cascade(subject, adapt, shape)
    if isinstance(task, Train):
        return Train(subject, task.config.changed(**short, seed=0, label_fraction=1.0, head="linear"))
    objective = task.config.objective
    assert isinstance(objective, SwAVConfig)
    objective = dataclasses.replace(objective, queue_length=8)
    config = dataclasses.replace(task.config.changed(**short, seed=0), objective=objective)
    needed = task.share_of
    assert needed is None or isinstance(needed, Adapt)
    return Adapt(subject, config, None if needed is None else miniature(needed, subject))


@pytest.mark.heavy
@pytest.mark.parametrize("name", STUDIES)
def test_the_first_steps_of_every_run_go_well(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.save(timm.create_model("resnet10t", num_classes=0).state_dict(), tmp_path / "w.pth")
    subject = Subject("resnet10t", few_clothes(tmp_path / "few.npz", train=6), str(tmp_path / "w.pth"))
    runs = [task for task in tasks_of(name) if isinstance(task, Adapt | Train | Cascade)]
    small = list(in_order(miniature(task, subject) for task in runs))
    runner = tasks_in(tmp_path / "out")
    found = runner.run_all(small)
    assert small
    assert {task.title: found[task] for task in small if runner.trouble(task)} == {}


def test_studies_share_their_runs() -> None:
    """The mask of CIFAR-10 is that of table 2, of the ablations and of the selective figure."""
    named = {name: {task.name for task in tasks_of(name) if isinstance(task, Adapt)} for name in ("rules", "ablations")}
    assert len(named["rules"] & named["ablations"]) == 3  # of cifar10, dtd and sun397
