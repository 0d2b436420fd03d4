"""A comparison: every cell once, whatever happens in between, and numbers that are those of its cells."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from selfmask import FeatureMap
from selfmask.backbones.loading import Backbone
from selfmask.commands.compare import Cell, CompareConfig, Comparison, compare
from selfmask.data import Images, SomeImages, label_split
from selfmask.embedding.vectors import embed
from selfmask.errors import (
    BadImageError,
    ConfigError,
    InterruptedRunError,
    RunMismatchError,
    TooFewImagesError,
)
from selfmask.evaluation import linear_probe
from selfmask.report.comparison import as_dict, draw, markdown
from selfmask.training.display import StagesDisplay
from tests.cli.inside import selfmask
from tests.cli.test_adapt import save_clothes
from tests.commands.labelled import clothes
from tests.commands.labelled import config as small_training
from tests.light import no_report
from tests.training.small import HOW, network
from tests.training.test_loop import Stopper

METHODS = ("frozen", "mask", "self-mask", "full")


@pytest.fixture(autouse=True, scope="module")
def _no_reports() -> Iterator[None]:
    """Of the runs that are compared."""
    with no_report():
        yield


def backbone() -> Backbone:
    return Backbone("small", network(), HOW, 16)


def small(**changes: Any) -> CompareConfig:
    start = {
        "methods": METHODS,
        "label_fractions": (0.5, 1.0),
        "seeds": 2,
        "steps": 2,
        "adapt_steps": 2,
        "batch_size": 8,
    }
    return CompareConfig.preset(changes.pop("preset", "fast"), **{**start, **changes})


def run(out: Path, config: CompareConfig | None = None, **options: Any) -> Comparison:
    images, test = clothes(100, 40)
    return compare(backbone, images, test, config or small(), out=out, **options)


@pytest.fixture(scope="module")
def whole(_no_reports: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    out = tmp_path_factory.mktemp("whole")
    return out, run(out)


def numbers(comparison: Comparison) -> dict[str, Any]:
    """All that does not depend on the clock."""
    return {
        cell.name: {key: value for key, value in found.items() if "seconds" not in key}
        for cell, found in comparison.results.items()
    }


def test_every_cell_is_there(whole: tuple[Path, Comparison]) -> None:
    _, comparison = whole
    assert len(comparison.results) == 6 * 2 * 2
    assert comparison.methods == ["frozen", "frozen+map", "mask", "self-mask", "self-mask+map", "full"]
    assert comparison.shares == [0.5, 1.0]
    assert comparison.accuracy("lora", 1.0) is None
    for found in comparison.results.values():
        assert 0 <= found["accuracy"] <= 1


def test_frozen_is_the_linear_probe_on_the_labels_of_the_cell(whole: tuple[Path, Comparison]) -> None:
    images, test = clothes(100, 40)
    (bank, _), (queries, _) = (embed(network(), part, HOW) for part in (images, test))
    labels, truth = torch.tensor(images.labels), torch.tensor(test.labels)
    for share in (0.5, 1.0):
        expected = []
        for seed in (0, 1):
            chosen = label_split(labels.tolist(), share, seed)
            expected.append(linear_probe(bank[chosen], labels[chosen], queries, truth))
        found = whole[1].accuracy("frozen", share)
        assert found is not None
        assert found[0] == pytest.approx(np.mean(expected))


def test_with_a_map_it_is_the_probe_on_mapped_vectors(whole: tuple[Path, Comparison]) -> None:
    found = whole[1]
    images, test = clothes(100, 40)
    (bank, _), (queries, _) = (embed(network(), part, HOW) for part in (images, test))
    whiten = FeatureMap.fit(bank)
    expected = linear_probe(whiten(bank), torch.tensor(images.labels), whiten(queries), torch.tensor(test.labels))
    assert found.accuracy("frozen+map", 1.0) == (pytest.approx(expected), 0.0)
    assert found.bytes("frozen+map") == found.bytes("frozen") + len(whiten.as_bytes())
    assert found.bytes("self-mask+map") > found.bytes("frozen+map")


def test_all_methods_of_a_cell_see_the_same_labels(whole: tuple[Path, Comparison]) -> None:
    by_cell: dict[tuple[float, int], set[int]] = {}
    for cell, found in whole[1].results.items():
        by_cell.setdefault((cell.share, cell.seed), set()).add(found["labels"])
    assert all(len(counts) == 1 for counts in by_cell.values())


class Cut(StagesDisplay):
    """Pulls the plug when the cell of that number is to begin, or stops politely in the middle of it."""

    def __init__(self, number: int, politely: bool) -> None:
        super().__init__()
        self.left, self._stop = number, Stopper(1) if politely else None

    def line(self, line: Mapping[str, Any]) -> None:
        super().line(line)
        self.left -= 1
        if self.left <= 0:
            if self._stop is None:
                raise KeyboardInterrupt
            self._stop.line({**line, "step": 1})


@pytest.mark.parametrize(
    ("lines", "politely", "methods"),
    [
        (2, False, ("frozen", "self-mask")),
        pytest.param(1, True, METHODS, marks=pytest.mark.heavy),
        pytest.param(9, True, METHODS, marks=pytest.mark.heavy),
    ],
)
def test_a_comparison_that_was_stopped_goes_on(
    tmp_path: Path, whole: tuple[Path, Comparison], lines: int, politely: bool, methods: tuple[str, ...]
) -> None:
    config = small(methods=methods)
    with pytest.raises((InterruptedRunError, KeyboardInterrupt)):
        run(tmp_path, config, display=Cut(lines, politely))
    finished = {file: file.stat().st_mtime_ns for file in tmp_path.glob("cells/*/result.json")}
    found, expected = numbers(run(tmp_path, config)), numbers(whole[1])
    assert 0 < len(finished) < len(found)
    assert found == {name: expected[name] for name in found}
    assert {file: file.stat().st_mtime_ns for file in finished} == finished  # not run again


def test_more_cells_can_be_added_but_no_other_settings(tmp_path: Path) -> None:
    first = run(tmp_path, small(methods=("frozen",), seeds=1))
    more = run(tmp_path, small(methods=("frozen", "mask"), seeds=1))
    assert len(more.results) == 6  # frozen with and without a map, and the mask, of two shares
    assert all(more.results[cell] == found for cell, found in first.results.items())
    with pytest.raises(RunMismatchError, match="steps"):
        run(tmp_path, small(steps=3))


class Watching(StagesDisplay):
    """Knows whether images are being read to learn from."""

    learning = False

    @contextmanager
    def decoding(self, total: int) -> Iterator[Any]:
        self.learning = True
        yield None
        self.learning = False

    @contextmanager
    def training(self, steps: int) -> Iterator[None]:
        self.learning = True
        yield
        self.learning = False


class Kept(SomeImages):
    """Images that nobody may look at while he learns."""

    def __init__(self, images: Images, display: Watching) -> None:
        super().__init__(images, range(len(images)))
        self.display, self.seen = display, 0

    def load(self, i: int, *, near: int | None = None) -> Tensor:
        assert not self.display.learning, "a test image is learned from"
        self.seen += 1
        return super().load(i, near=near)


@pytest.mark.parametrize("preset", ["fast", pytest.param("paper", marks=pytest.mark.heavy)])
def test_test_images_are_never_learned_from(tmp_path: Path, preset: str) -> None:
    """Neither by a step nor into a queue (`paper` has one): nothing that learns ever reads one."""
    (images, test), display = clothes(100, 40), Watching()
    kept = Kept(test, display)
    config = small(seeds=1, label_fractions=(1.0,), preset=preset, methods=("frozen", "self-mask", "mask", "full"))
    compare(backbone, images, kept, config, out=tmp_path / "run", display=display)
    assert kept.seen
    with pytest.raises(AssertionError, match="learned from"):  # and that this would be noticed
        compare(backbone, kept, kept, config, out=tmp_path / "leak", display=display)


class OneBad(SomeImages):
    def load(self, i: int, *, near: int | None = None) -> Tensor:
        if i == 3:
            raise BadImageError("cannot read", found="nothing")
        return super().load(i, near=near)


def test_methods_see_the_same_labels_where_an_image_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits: list[list[int]] = []

    def noted(*arguments: Any, **options: Any) -> list[int]:
        splits.append(label_split(*arguments, **options))
        return splits[-1]

    for module in ("commands.compare", "commands.train"):
        monkeypatch.setattr(f"selfmask.{module}.label_split", noted)
    images, test = clothes(100, 40)
    config = small(methods=("frozen", "linear"), label_fractions=(0.5,), seeds=1)
    found = compare(backbone, OneBad(images, range(100)), test, config, out=tmp_path)
    assert len(splits) >= 3
    assert all(split == splits[0] for split in splits)
    assert len({numbers["labels"] for numbers in found.results.values()}) == 1


def test_other_weights_or_labels_are_another_comparison(tmp_path: Path) -> None:
    config = small(methods=("frozen",), seeds=1)
    run(tmp_path, config)
    images, test = clothes(100, 40)
    images.labels = list(reversed(images.labels or []))
    with pytest.raises(RunMismatchError, match="images = "):
        compare(backbone, images, test, config, out=tmp_path)
    other = network()
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    images, test = clothes(100, 40)
    with pytest.raises(RunMismatchError, match="base"):
        compare(lambda: Backbone("small", other, HOW, 16), images, test, config, out=tmp_path)


def test_presets_of_the_paper_set_up_every_method_as_it_does() -> None:
    for name in ("paper", "reference"):
        config = CompareConfig.preset(name)
        cells = {
            cell.method: config.training(cell).resolved(network())
            for cell in config.cells
            if cell.method in ("mask", "full")
        }
        assert {cells[method].head for method in cells} == {"linear"}
        assert (cells["mask"].lr, cells["mask"].warmup) == (50, 40 / 150)
        assert (cells["full"].lr, cells["full"].warmup, cells["full"].weight_decay) == (0.001, 0, 5e-4)


def test_what_would_stop_it_half_way_is_said_first(tmp_path: Path) -> None:
    with pytest.raises(TooFewImagesError, match="batch"):
        run(tmp_path, small(batch_size=90))
    assert not (tmp_path / "cells").exists()


def test_a_run_that_diverges_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompareConfig, "training", lambda self, cell: dataclasses.replace(settings, method=cell.method))
    settings = dataclasses.replace(small_training(), lr=1e30)
    config = small(methods=("frozen", "full"), label_fractions=(1.0,), seeds=1)
    for _ in range(2):  # and is not run again
        found = run(tmp_path, config)
        assert "not finite" in found.results[Cell("full", 1.0, 0)]["diverged"]
        assert found.accuracy("full", 1.0) is None
    assert "| full fine-tuning | - | - |" in markdown(found)
    draw(found, tmp_path / "figure.png")


def test_what_cannot_be_compared_is_refused() -> None:
    for wrong in ({"methods": ("magic",)}, {"label_fractions": (0.0,)}, {"seeds": 0}, {"methods": ()}):
        with pytest.raises(ConfigError):
            small(**wrong)


def test_table_and_figure(tmp_path: Path) -> None:
    cells = {
        Cell("frozen", 0.1, 0): {"accuracy": 0.5, "bytes": 100},
        Cell("frozen", 0.1, 1): {"accuracy": 0.6, "bytes": 100},
        Cell("mask", 0.1, 0): {"accuracy": 0.7, "bytes": 1000},
        Cell("mask", 1.0, 0): {"accuracy": 0.9, "bytes": 3000},
    }
    comparison = Comparison(cells)
    text = markdown(comparison)
    assert "| frozen + linear probe | 100 | 55.0 ± 63.5 | - |" in text  # t of one degree of freedom is 12.7
    assert "| supervised mask | 2,000 | 70.0 | 90.0 |" in text
    assert as_dict(comparison)["summary"][1]["bytes"] == 2000
    draw(comparison, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_command(tmp_path: Path) -> None:
    save_clothes(tmp_path / "photos", 60)
    command = ["compare", str(tmp_path / "photos"), "--backbone", "selfmask/tiny"]
    command += ["--methods", "frozen,linear", "--label-fractions", "0.5", "--seeds", "1", "--steps", "2", "--json"]
    done = selfmask(*command, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["cells"]) == ["frozen-0.5-0", "frozen+map-0.5-0", "linear-0.5-0"]
    for name in ("compare.md", "compare.png", "compare.json"):
        assert (tmp_path / "out" / name).exists()
    wrong = selfmask(*command, "--methods", "magic")
    assert wrong.returncode == 2
    assert "unknown method" in wrong.stderr
