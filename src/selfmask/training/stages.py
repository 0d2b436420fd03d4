"""What the user sees of a job of many stages: one bar over all of them, with the time left."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .display import QuietDisplay


class StagesDisplay(QuietDisplay):
    """Says nothing without a console. Stages are weighed by what they cost, so that the time left means something."""

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._costs: Mapping[str, float] = {}
        self._shares: dict[str, float] = {}  # how far each stage is, from 0 to 1
        self._before = self._start = 0.0  # what earlier processes had done, and when this one began
        self._stage: str | None = None
        self._steps = 1

    @contextmanager
    def stages(self, costs: Mapping[str, float], finished: Collection[str]) -> Iterator[None]:
        """Within, stages of these names run; the cost of each is in any unit. `finished` were done before."""
        self._costs, self._start = costs, time.monotonic()
        self._shares = {name: float(name in finished) for name in costs}
        self._before = self._done
        if finished:
            self.say(f"{len(finished)} of {len(costs)} are finished already")
        if self.console is None or not self.console.is_terminal:
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.percentage:.0f} %"))
        remaining = TimeRemainingColumn(compact=True)
        with Progress(
            *columns, remaining, console=self.console, transient=True, speed_estimate_period=600
        ) as self._bar:
            self._bar.add_task("", total=sum(costs.values()))
            self._bar.update(self._bar.task_ids[0], completed=self._done)
            try:
                yield
            finally:
                self._bar = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run one stage; `line` and `share` then are about it."""
        self._stage, start = name, time.monotonic()
        self.share(0.0)
        yield
        self.finished(name, time.monotonic() - start)
        self._stage = None

    def finished(self, name: str, seconds: float) -> None:
        self.share(1.0, name)
        done = self._done
        left = (sum(self._costs.values()) - done) * (time.monotonic() - self._start) / max(done - self._before, 1e-9)
        count = sum(share == 1 for share in self._shares.values())
        self.say(f"{count}/{len(self._costs)}  {name}: {seconds:.0f} s; about {_duration(left)} left")

    def share(self, share: float, name: str | None = None) -> None:
        """How far a stage is: this one, or one that runs elsewhere."""
        name = name or self._stage
        if name is None or name not in self._costs:
            return
        self._shares[name] = min(1.0, share)
        if self._bar is not None:
            running = [each for each, part in self._shares.items() if 0 < part < 1] or [name]
            finished = sum(part == 1 for part in self._shares.values())
            shown = running[0] if len(running) == 1 else f"{running[0]} and {len(running) - 1} more"
            which = f"{min(finished + 1, len(self._costs))}/{len(self._costs)} {shown}"
            self._bar.update(self._bar.task_ids[0], completed=self._done, description=which)

    @property
    def _done(self) -> float:
        return sum(cost * self._shares[name] for name, cost in self._costs.items())

    def count(self, done: int, total: int) -> None:
        """How far this stage is, in images."""
        self.share(done / max(1, total))

    @contextmanager
    def training(self, steps: int) -> Iterator[None]:
        self._steps = steps
        yield

    def line(self, line: Mapping[str, Any]) -> None:
        self.share(line["step"] / self._steps * 0.99)  # what comes after the last step takes a moment, too

    def say(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
