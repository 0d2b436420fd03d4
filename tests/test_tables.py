"""Tables of the docs that a command prints from a log: every row that is printed stands in the page, to the digit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks import curve, looks, odd, rates

ROOT = Path(__file__).parent.parent
PAGES: dict[str, tuple[str, Callable[[], None]]] = {
    "budgets": ("budget.md", lambda: curve.show(curve.read(ROOT / curve.LOG))),
    "the gate before": ("gate.md", lambda: curve.show(curve.read(ROOT / curve.BEFORE), curve.read(ROOT / curve.LOG))),
    "odd sets": ("budget.md", lambda: curve.show(curve.read(ROOT / odd.LOG))),
    "rates": ("rivals.md", lambda: rates.show(curve.read(ROOT / rates.LOG))),
    "looks": ("gate.md", lambda: looks.show(curve.read(ROOT / looks.LOG))),
}


@pytest.mark.parametrize("table", PAGES)
def test_a_page_shows_what_its_command_prints(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, show = PAGES[table]
    show()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    shown = set((ROOT / "docs" / name).read_text().splitlines())
    assert len(printed) > 2
    assert [line for line in printed if line not in shown] == []
