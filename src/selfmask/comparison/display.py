"""What the user sees of a comparison: one bar over the whole grid, with the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..training.display import QuietDisplay

if TYPE_CHECKING:
    from .grid import Cell


class GridDisplay(QuietDisplay):
    """Says nothing without a console. Cells are weighed by what they cost, so that the time left means something."""

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._costs: Mapping[Cell, int] = {}
        self._done = self._new = 0  # what is done in all, and in this process
        self._cell: Cell | None = None
        self._finished = 0
        self._start = 0.0

    @contextmanager
    def grid(self, costs: Mapping[Cell, int], finished: Sequence[Cell]) -> Iterator[None]:
        self._costs, self._start = costs, time.monotonic()
        self._finished, self._done = len(finished), sum(costs[cell] for cell in finished)
        if finished:
            self.say(f"{len(finished)} of {len(costs)} cells are finished already")
        if self.console is None or not self.console.is_terminal:
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.percentage:.0f} %"))
        with Progress(*columns, TimeRemainingColumn(compact=True), console=self.console, transient=True) as self._bar:
            self._bar.add_task("comparing", total=sum(costs.values()), completed=self._done)
            try:
                yield
            finally:
                self._bar = None

    @contextmanager
    def cell(self, cell: Cell) -> Iterator[None]:
        self._cell = cell
        start = time.monotonic()
        self._show(0)
        yield
        self._done += self._costs[cell]
        self._new += self._costs[cell]
        self._finished += 1
        self._show(0)
        left = (sum(self._costs.values()) - self._done) * (time.monotonic() - self._start) / self._new
        self.say(
            f"{self._finished}/{len(self._costs)}  {cell.method}, {cell.share:.4g} of the labels, seed {cell.seed}: "
            f"{time.monotonic() - start:.0f} s; about {left / 60:.0f} min left"
        )

    def line(self, line: Mapping[str, Any]) -> None:
        self._show(line["step"])

    def say(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _show(self, step: int) -> None:
        if self._bar is None or self._cell is None:
            return
        within = min(step * (3 if self._cell.method == "self-mask" else 1), self._costs[self._cell])
        self._bar.update(
            self._bar.task_ids[0],
            completed=self._done + within,
            description=f"{self._finished + 1}/{len(self._costs)} {self._cell.name}",
        )
