from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from selfmask.serving import building
from selfmask.serving.engine import Engine

from .indexed import indexed, save_run
from .served import save_mask, save_masks, served


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three masks, one with a head, and one in a run folder."""
    folder = tmp_path_factory.mktemp("masks")
    save_masks(folder, 3)
    save_mask(folder / "animals.smn", seed=7, classes=["cat", "dog", "owl"])
    save_mask(folder / "run" / "mask.smn", seed=8)
    return folder


@pytest.fixture(scope="module")
def server(masks: Path) -> Iterator[tuple[httpx2.Client, Engine]]:
    with served(masks) as both:
        yield both


@pytest.fixture
def client(server: tuple[httpx2.Client, Engine]) -> httpx2.Client:
    return server[0]


@pytest.fixture
def engine(server: tuple[httpx2.Client, Engine]) -> Engine:
    return server[1]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs whose masks differ."""
    place = tmp_path_factory.mktemp("runs")
    return save_run(place / "birds", seed=1), save_run(place / "cats", seed=2)


@pytest.fixture(scope="session")
def whole(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection with two masks, graphs and all."""
    out = tmp_path_factory.mktemp("collection") / "clothes.index"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "APPROXIMATE_FROM", 50)
        patch.setattr(building, "POINTS", 12)
        indexed(out, *runs)
    return out


@pytest.fixture
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """On planes: t-SNE would take most of the time."""
    monkeypatch.setattr(building, "POINTS", 12)
