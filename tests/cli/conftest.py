"""Pictures to run the command line on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.inside import selfmask
from tests.cli.small import SMALL, fine
from tests.cli.test_adapt import save_clothes
from tests.light import no_report

LONG = (
    "--rule",
    "topk",
    "--active-share",
    "0.5",
    "--select",
    "paper-resnet",
    "--exclude",
    "*.bias",
    "--fraction",
    "0.5",
    "--fraction-by",
    "magnitude",
    "--norm",
    "frozen",
    "--objective",
    "swav",
    "--prototypes",
    "500",
    "--weight-decay",
    "5e-4",
    "--head-lr",
    "0.15",
    "--jitter",
    "0.4,0.4,0.4,0.1",
)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty of them, in folders by class."""
    folder = tmp_path_factory.mktemp("photos")
    save_clothes(folder, 60)
    return folder


@pytest.fixture(scope="module")
def no_reports() -> Iterator[None]:
    """For tests of anything but reports."""
    with no_report():
        yield


@pytest.fixture(scope="session")
def long(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose settings were all given as options."""
    out = tmp_path_factory.mktemp("long") / "run"
    fine(selfmask("adapt", photos, *SMALL, *LONG, "--out", out))
    return out
