"""What the user sees of a run, or of a job of many: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..objectives import Health
from ..training.display import Count, StagesDisplay
from .console import Console

_PLAIN_EVERY = 10.0  # seconds between plain lines


class _WithNumbers(Progress):
    """A bar, and under it the numbers: on one line, a narrow terminal would cut off the time left."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        yield from (Text(task.description, style="dim") for task in self.tasks if task.description)


class ConsoleDisplay:
    """Step, loss against ln K, active share, flips, speed and time left; a bar that is drawn over in a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._steps = 0
        self._first: tuple[int, float] | None = None  # the first step that was reported, and when
        self._said = 0.0
        self._quality = ""  # as last measured, which is not on every line

    @contextmanager
    def decoding(self, total: int) -> Iterator[Count | None]:
        if not self.console.redraws:
            yield None
            return
        with self._progress("decoding images", total) as bar:
            yield lambda done, _: bar.update(bar.task_ids[0], completed=done)

    @contextmanager
    def training(self, steps: int) -> Iterator[None]:
        self._steps, self._first, self._said = steps, None, time.monotonic()
        if not self.console.redraws:
            yield
            return
        try:
            with self._progress("training", steps) as self._bar:
                yield
        finally:
            self._bar = None

    def _progress(self, what: str, total: int) -> Progress:
        columns = (TextColumn(what), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
        bar = _WithNumbers(*columns, console=self.console, transient=True, speed_estimate_period=600)
        bar.add_task("", total=total)
        return bar

    def say(self, text: str) -> None:
        self.console.say(text)

    def line(self, line: Mapping[str, Any]) -> None:
        text, step, now = describe(line), line["step"], time.monotonic()
        if "trouble" in line:
            self.say(f"step {step}: {line['trouble']}; {line['answer']}")
        if "quality" in line:
            self._quality = f"  quality {line['quality']:.3f}"
        text += self._quality
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, description=text)
            return
        self._first = self._first or (step, now)
        if now - self._said < _PLAIN_EVERY and step < self._steps:
            return
        self._said = now
        first, start = self._first
        left = f"  {(now - start) / (step - first) * (self._steps - step):.0f} s left" if step > first else ""
        self.say(f"step {step}/{self._steps}  {text}{left}")


def describe(line: Mapping[str, Any]) -> str:
    guess = Health.of_line(line).guess
    parts = [f"loss {line['loss']:.3f}" + (f" (ln K {guess:.2f})" if guess is not None else "")]
    if "active" in line:
        parts += [f"active {line['active']:.2%}", f"{line['flips']:.0f} flips/step"]
    if "accuracy" in line:
        parts.append(f"accuracy {line['accuracy']:.3f}")
    return "  ".join([*parts, f"{line['images_per_second']:.0f} images/s"])


class ConsoleStages(StagesDisplay):
    """One bar over all stages, with the time left."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self._bar: Progress | None = None

    @contextmanager
    def stages(self, costs: Mapping[str, float], finished: Collection[str]) -> Iterator[None]:
        with super().stages(costs, finished):
            if not self.console.redraws:
                yield
                return
            columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.percentage:.0f} %"))
            left = TimeRemainingColumn(compact=True)
            with Progress(*columns, left, console=self.console, transient=True, speed_estimate_period=600) as self._bar:
                self._bar.add_task("", total=sum(costs.values()))
                self._bar.update(self._bar.task_ids[0], completed=self.done)
                try:
                    yield
                finally:
                    self._bar = None

    def share(self, share: float, name: str | None = None) -> None:
        super().share(share, name)
        running = [each for each, part in self.shares.items() if 0 < part < 1] or [name or self._stage or ""]
        if self._bar is None or running == [""]:
            return
        finished = sum(part == 1 for part in self.shares.values())
        shown = running[0] if len(running) == 1 else f"{running[0]} and {len(running) - 1} more"
        which = f"{min(finished + 1, len(self.costs))}/{len(self.costs)} {shown}"
        self._bar.update(self._bar.task_ids[0], completed=self.done, description=which)

    def say(self, text: str) -> None:
        self.console.say(text)
