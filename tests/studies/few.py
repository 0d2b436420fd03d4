"""Studies of few steps on few real pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from selfmask.data import open_images
from selfmask.objectives.swav import SwAVConfig
from selfmask.studies import cascade, low_shot, scale
from selfmask.studies.catalogue import STUDIES
from selfmask.studies.numbers import paper_numbers
from selfmask.studies.runner import Tasks
from selfmask.studies.scale import Scale
from selfmask.training.display import StagesDisplay

SHORT: dict[str, Any] = {"steps": 2, "batch_size": 8, "log_every": 1, "checkpoint_every": 2}


def few_clothes(file: Path, train: int = 3, test: int = 2) -> str:
    """An array file with the first pictures of every class in each part of the bundled set."""
    arrays: dict[str, NDArray[Any]] = {"classes": np.array([f"class {i}" for i in range(10)])}
    for split, count in (("train", train), ("test", test)):
        images = open_images("selfmask/fashion", split=split)
        assert images.labels is not None
        labels = np.array(images.labels)
        numbers = np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in range(10)]))
        arrays[f"{split}_images"] = np.stack([images[i].permute(1, 2, 0).numpy() for i in numbers])
        arrays[f"{split}_labels"] = labels[numbers]
    np.savez(file, **arrays)
    return str(file)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of two steps, at a rate at which these change something."""
    objective = SwAVConfig(freeze_prototypes=0.0, queue_length=0, prototypes=5)
    monkeypatch.setattr(scale, "_SHORT_ADAPT", {**SHORT, "objective": objective, "lr": 2000.0})
    monkeypatch.setattr(scale, "_SHORT_TRAIN", SHORT)
    monkeypatch.setattr(scale, "_SHORT_PRETRAIN", {**SHORT, "epochs": None})
    monkeypatch.setattr(cascade, "SHAPE", {"experts": 2, "components": 4, "router": "kmeans"})
    monkeypatch.setattr(low_shot, "_LAPTOP_SHARES", (0.2, 0.5))


def small_scale(folder: Path, seeds: int = 1) -> Scale:
    return Scale("laptop", data=(few_clothes(folder / "few.npz"),), seeds=seeds)


def tasks_in(folder: Path) -> Tasks:
    return Tasks(folder / "studies", StagesDisplay())


def without_entry(study: str, *, curves: bool = False) -> set[tuple[object, ...]]:
    """Numbers of the paper that no entry of the study at full scale stands beside.

    curves: their points are not asked for, since only results tell how many there are.
    """
    found = STUDIES[study].entries(Scale("paper"))
    have = {(e.case.backbone, e.setting, e.case.data, e.measure, None if curves else e.x) for e in found}
    numbers = paper_numbers(study)
    printed = {(n.backbone, n.setting, n.data, n.measure, None if curves else n.x) for n in numbers}
    return printed - have
