"""The study of clusters: classes counted as in the paper's figure, and planes drawn from what a task left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from selfmask.studies import clusters
from selfmask.studies.catalogue import STUDIES
from selfmask.studies.clusters import VARIANTS, Pictures, cumulative, in_paper_order, neighbours_alike
from selfmask.studies.numbers import find
from selfmask.studies.output import lines_of, write
from selfmask.studies.runner import findings
from selfmask.studies.scale import Scale
from selfmask.studies.tasks import Adapt, Cascade
from tests.light import no_report

from .few import short, small_scale, tasks_in, without_entry

__all__ = ["short"]
STUDY = STUDIES["clusters"]


def test_the_share_of_the_most_common_classes() -> None:
    labels = np.random.default_rng(0).integers(0, 7, 50)
    counts = sorted((list(labels).count(label) for label in range(9)), reverse=True)
    expected = [sum(counts[: i + 1]) / 50 for i in range(9)]
    assert cumulative(torch.tensor(labels), 9) == pytest.approx(expected)
    assert cumulative(torch.tensor(labels), 9)[-1] == 1


def test_clusters_are_numbered_as_the_papers_by_how_even_they_are() -> None:
    at_20 = [
        find("clusters", setting=f"cluster {number}", measure="cumulative_share", x=20.0) for number in range(1, 6)
    ]
    assert at_20 == [0.642, 0.928, 0.868, 0.896, 0.722]
    shares = [[0.0, share, *[1.0] * 8] for share in (0.5, 0.1, 0.4, 0.2, 0.3)]  # two of ten classes are a fifth
    found = in_paper_order(shares)
    ours = [found[str(number)][1] for number in range(1, 6)]
    assert ours == [0.1, 0.5, 0.3, 0.4, 0.2]
    assert np.argsort(ours).tolist() == np.argsort([float(share or 0) for share in at_20]).tolist()


def test_neighbours_on_a_plane() -> None:
    rng = np.random.default_rng(0)
    points, labels = rng.normal(size=(40, 2)), rng.integers(0, 3, 40)
    alike = []
    for i in range(40):
        distances = [(float(((points[i] - points[j]) ** 2).sum()), j) for j in range(40) if j != i]
        alike += [labels[j] == labels[i] for _, j in sorted(distances)[:10]]
    assert neighbours_alike(points, labels) == pytest.approx(np.mean(alike))


def test_what_three_of_five_clusters_have_at_least() -> None:
    shares = {str(i): [0.0, share, 1.0] for i, share in enumerate((0.5, 0.1, 0.4, 0.2, 0.3))}
    result = {"classes": 10, "clusters": shares}
    read = {
        e.setting: e.read(result) for e in STUDY.entries(Scale("paper")) if e.measure == "cumulative_share_at_least"
    }
    assert read == {"all five clusters": 0.1, "three clusters": 0.3}


def test_cascades_are_those_of_the_paper() -> None:
    (task,) = {entry.task for entry in STUDY.entries(Scale("paper"))}
    assert isinstance(task, Pictures)
    config = task.of.config
    assert (config.experts, config.router, config.components) == (5, "gmm", 20)
    assert (task.subject.backbone, task.subject.data) == ("swav/resnet50", "cifar100")
    assert task.of.dispatcher.config == config.adapt
    assert without_entry("clusters", curves=True) == set()


@pytest.mark.heavy
def test_a_small_cascade_is_drawn(tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    scale, tasks = small_scale(tmp_path), tasks_in(tmp_path)
    monkeypatch.setattr(clusters, "_SHOWN_CLASSES", 4)
    entries = STUDY.entries(scale)
    task = entries[0].task
    assert isinstance(task, Pictures)
    assert isinstance(task.of, Cascade)
    assert isinstance(task.of.dispatcher, Adapt)
    with no_report():
        tasks.run_all([task.of.dispatcher, task.of, task])
    result = tasks.result(task)
    assert result["classes"] == 10
    assert set(result["clusters"]) == {"1", "2"}
    sizes = tasks.result(task.of)["sizes"]
    assert sum(sizes) == 30
    for shares in result["clusters"].values():
        assert len(shares) == 10
        assert shares == sorted(shares)
        assert shares[-1] == pytest.approx(1)
    with np.load(tasks.place(task) / "points.npz") as points:
        labels = points["labels"]
        assert set(labels) == {0, 1, 2, 3}
        for name in VARIANTS:
            assert points[name].shape == (len(labels), 2)
            assert result["neighbours_alike"][name] == pytest.approx(neighbours_alike(points[name], labels))
    found = findings(STUDY, scale, tasks)
    assert {entry.setting for entry in found.missing} == {"all five clusters", "three clusters"}  # there are but two
    lines = {(line.setting, line.measure, line.x): line for line in lines_of(found)}
    assert lines["cluster 2", "cumulative_share", 30.0].mean == pytest.approx(result["clusters"]["2"][2])
    assert lines["cluster 2", "cumulative_share", 30.0].paper == 0.970  # of thirty of a hundred classes
    files = write(found, tmp_path / "results")
    assert [file.suffix for file in files] == [".csv", ".md", ".html", ".svg", ".svg"]
    assert files[-1].name == "clusters-tsne-1.svg"
