"""Curves whose points only results know, claims that two settings are the same, and the heads of CLIP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from selfmask.studies import tasks as task_module
from selfmask.studies.output import as_csv, as_markdown, lines_of, page_of
from selfmask.studies.runner import Findings, run_study
from selfmask.studies.scale import CLIP, Case, Scale
from selfmask.studies.study import Claim, Entry, Study
from selfmask.studies.tasks import Subject, Task, Train, World, leave
from selfmask.studies.verdicts import judged

from .few import SHORT, few_clothes, tasks_in

SUBJECT = Subject("selfmask/tiny", "selfmask/fashion")
CASE = Case(SUBJECT, "", "cifar10")


@dataclasses.dataclass(frozen=True)
class Toy(Task):
    verb = "toy"
    points: int = 1
    seed: int = 0
    shift: float = 0.0

    @property
    def title(self) -> str:
        return f"toy {self.points} {self.seed} {self.shift}"

    def settings(self) -> Mapping[str, Any]:
        return {"points": self.points, "seed": self.seed, "shift": self.shift}

    def run(self, place: Path, world: World) -> None:
        leave(place, {"curve": {str(x): 2.0 + self.shift * (1 + self.seed) for x in range(1, self.points + 1)}})


class Toys(Study):
    name = "invariance"
    title = "A study of toys"
    claims = (Claim("both are the same", ("loss",), "standard", "other", x=1, equal=True),)

    def __init__(self, points: int, *shifts: float) -> None:
        self.points, self.shifts = points, shifts

    def entries(self, scale: Scale) -> list[Entry]:
        def read(result: Mapping[str, Any]) -> dict[float | None, float]:
            return {float(x): value for x, value in result["curve"].items()}

        return [
            Entry(
                CASE,
                setting,
                "loss",
                Toy(SUBJECT, self.points, seed, shift if setting == "other" else 0.0),
                read,
                seed=seed,
            )
            for setting in ("standard", "other")
            for seed, shift in enumerate(self.shifts)
        ]


def found_of(tmp_path: Path, points: int, *shifts: float) -> Findings:
    return run_study(Toys(points, *shifts), Scale("laptop"), tasks_in(tmp_path))


def test_each_point_of_a_curve_stands_beside_the_papers(tmp_path: Path) -> None:
    found = found_of(tmp_path, 3, 0.0)
    lines = lines_of(found)
    assert [(line.setting, line.x, line.mean) for line in lines[:3]] == [("standard", x, 2.0) for x in (1, 2, 3)]
    assert [line.paper for line in lines[:3]] == [2.305828332901, 2.30540108680725, 2.30212211608887]
    assert str(CASE) == "selfmask/tiny x selfmask/fashion (for cifar10)"  # the paper names no backbone there


def test_long_curves_are_left_to_figures_and_the_csv_file(tmp_path: Path) -> None:
    found = found_of(tmp_path, 21, 0.0)
    lines = lines_of(found)
    page = as_markdown(page_of(found, lines))
    assert "42 more, the points of long curves, are in invariance.csv" in page
    assert "| standard | loss |" not in page
    assert as_csv(lines).count("standard,loss") == 21


@pytest.mark.parametrize(
    ("shifts", "verdict"),
    [
        ((0.0, 0.0, 0.0), "repeated"),  # not one bit apart
        ((0.1, -0.1, 0.05), "repeated"),  # within the spread
        ((0.5, 0.26, 0.17), "contradicted"),
        ((0.0,), "not visible"),
    ],
)
def test_the_same_means_within_the_spread(tmp_path: Path, shifts: tuple[float, ...], verdict: str) -> None:
    assert judged(Toys.claims[0], found_of(tmp_path, 1, *shifts))[0] == verdict


def test_numbers_near_zero_keep_their_digits(tmp_path: Path) -> None:
    found = found_of(tmp_path, 1, -1.99995)
    assert "| 5e-05 |" in as_markdown(page_of(found, lines_of(found)))


def test_masks_of_clip_train_as_in_the_paper() -> None:
    config = Scale("paper").train(head="clip-text", seed=3)
    assert (config.epochs, config.mask.select, config.head, config.seed) == (32, "paper-vit", "clip-text", 3)
    (case,) = Scale("paper").cases(("dtd",), (CLIP,))
    assert case.backbone == "vit_base_patch32_clip_224.openai"  # as the list of the paper's numbers has it


def test_the_head_of_clip_is_made_of_the_names_of_the_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def embeddings(name: str, classes: list[str], weights: Path | None) -> tuple[torch.Tensor, float]:
        asked.extend([name, classes, weights])
        return F.normalize(torch.randn(len(classes), 256), dim=1), 10.0

    monkeypatch.setattr(task_module, "class_embeddings", embeddings)
    config = Scale("laptop").train(head="clip-text", mask={"select": "paper"}).changed(**SHORT)
    run = Train(Subject("selfmask/tiny", few_clothes(tmp_path / "few.npz")), config)
    tasks = tasks_in(tmp_path)
    tasks.run_all([run])
    assert tasks.result(run)["head"] == "clip-text"
    assert asked == ["selfmask/tiny", [f"class {i}" for i in range(10)], None]
