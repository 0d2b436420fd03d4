"""The laptop scale: what its runs have of the paper, how few images they see, and how backbones are pretrained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from selfmask import FeatureMap
from selfmask.backbones import load_backbone
from selfmask.commands.pretrain import PretrainConfig
from selfmask.embedding.vectors import embed
from selfmask.errors import ConfigError
from selfmask.evaluation import knn_accuracy
from selfmask.studies.catalogue import STUDIES
from selfmask.studies.plan import plan
from selfmask.studies.runner import in_order
from selfmask.studies.scale import Scale
from selfmask.studies.tasks import Adapt, Measure, Pretrain, Subject

from .few import few_clothes, short, small_scale, tasks_in

__all__ = ["short"]
LAPTOP = Scale("laptop")


def test_runs_have_the_papers_rule_and_objective_and_a_rate_that_is_said() -> None:
    adapt, train = LAPTOP.adapt(), LAPTOP.train()
    assert (adapt.lr, train.lr) == (20 * 50, None)  # None: the preset's, 50
    for config in (adapt, train):
        assert (config.mask.rule, config.mask.s0, config.mask.mu, config.momentum) == ("threshold", 1.0, 0.0, 0.9)
        assert config.mask.select == "paper"
        assert not config.per_tensor
    assert (adapt.objective.name, adapt.gate) == ("swav", False)


def test_the_whole_suite_fits_an_evening() -> None:
    found = plan(list(STUDIES.values()), LAPTOP)
    assert found.minutes < 100
    assert found.minutes < sum(plan([each], LAPTOP).minutes for each in STUDIES.values())  # shared cells are run once


def test_claims_are_judged_over_three_seeds() -> None:
    for study in STUDIES.values():
        if study.claims:
            assert {entry.seed for entry in study.entries(LAPTOP)} >= {0, 1, 2}


def test_few_images_are_of_each_class_alike(tmp_path: Path) -> None:
    data = few_clothes(tmp_path / "few.npz", train=4)
    train, test = tasks_in(tmp_path).labelled(Subject("selfmask/tiny", data, most_images=20))
    assert sorted(train.labels or []) == sorted(list(range(10)) * 2)
    assert len(test) == 20
    whole, _ = tasks_in(tmp_path).labelled(Subject("selfmask/tiny", data, most_images=500))
    assert len(whole) == 40


@pytest.mark.usefixtures("short")
def test_starts_are_pretrained_each_in_its_own_way(tmp_path: Path) -> None:
    entries = [e for e in STUDIES["ablations"].entries(small_scale(tmp_path)) if e.setting.endswith("weights")]
    tasks = list(in_order(entry.task for entry in entries))
    assert [type(task) for task in tasks] == [Pretrain, Adapt, Measure] * 3
    runner = tasks_in(tmp_path)
    runner.run_all(tasks)
    assert not any(map(runner.trouble, tasks))
    files = [runner.weights(task.subject) for task in tasks if isinstance(task, Adapt)]
    assert all(file is not None and file.is_file() for file in files)
    first = [runner.backbone(task.subject).model.stem.conv.weight for task in tasks if isinstance(task, Adapt)]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    assert not torch.equal(first[1], first[2])


def test_an_objective_that_nothing_is_pretrained_by_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown objective"):
        PretrainConfig(objective="neighbours")  # type: ignore[arg-type]


def test_a_cascade_stands_beside_one_mask_that_is_whitened_too(tmp_path: Path) -> None:
    """A cascade whitens its vectors: one mask without that would be no rival."""
    scale, runner = Scale("laptop", data=(few_clothes(tmp_path / "few.npz", train=6),), seeds=1), tasks_in(tmp_path)
    entries = [e for e in STUDIES["cascade"].entries(scale) if e.setting.endswith("whitened")]
    assert {e.setting for e in entries} == {"frozen, whitened", "SMN, whitened"}
    (entry,) = (e for e in entries if (e.setting, e.measure) == ("frozen, whitened", "knn_20"))
    runner.begin()
    place = runner.place(entry.task)
    place.mkdir(parents=True)
    entry.task.run(place, runner)
    backbone, (train, test) = load_backbone("selfmask/tiny"), runner.labelled(entry.case.subject)
    x, y = (embed(backbone.model.eval(), images, backbone.preprocessing)[0] for images in (train, test))
    whiten = FeatureMap.fit(x).at(1.0)
    expected = knn_accuracy(whiten(x), train.labels or [], whiten(y), test.labels or [], k=20)
    assert entry.read(runner.result(entry.task)) == expected
    assert expected != knn_accuracy(x, train.labels or [], y, test.labels or [], k=20)
