"""What the user sees of a run: one live line in a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_PLAIN_EVERY = 10.0  # seconds between plain lines

Count = Callable[[int, int], None]


class Display(Protocol):
    def decoding(self, total: int) -> AbstractContextManager[Count | None]: ...
    def training(self, steps: int) -> AbstractContextManager[None]: ...
    def line(self, line: Mapping[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...


class QuietDisplay:
    """Says nothing."""

    @contextmanager
    def decoding(self, total: int) -> Iterator[Count | None]:
        yield None

    @contextmanager
    def training(self, steps: int) -> Iterator[None]:
        yield

    def line(self, line: Mapping[str, Any]) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class ConsoleDisplay:
    """Step, loss against ln K, active share, flips, speed and time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._steps = self._last = self._first_step = 0
        self._started = self._said = 0.0

    @contextmanager
    def decoding(self, total: int) -> Iterator[Count | None]:
        with self._progress("decoding images") as progress:
            task = progress.add_task("", total=total)
            yield lambda done, _: progress.update(task, completed=done)

    @contextmanager
    def training(self, steps: int) -> Iterator[None]:
        self._steps, self._started, self._said = steps, time.monotonic(), time.monotonic()
        self._first_step = -1
        with self._progress("adapting") as self._bar:
            self._task = self._bar.add_task("", total=steps)
            yield
        self._bar = None

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def _progress(self, what: str) -> Progress:
        columns = (TextColumn(what), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
        return Progress(*columns, TextColumn("{task.description}"), console=self.console, transient=True)

    def line(self, line: Mapping[str, Any]) -> None:
        text = describe(line)
        if self.console.is_terminal and self._bar is not None:
            self._bar.update(self._task, completed=line["step"], description=text)
            return
        now = time.monotonic()
        if self._first_step < 0:
            self._first_step, self._started = line["step"], now
        if now - self._said < _PLAIN_EVERY and line["step"] < self._steps:
            return
        self._said = now
        done = line["step"] - self._first_step
        left = (now - self._started) / done * (self._steps - line["step"]) if done else 0
        self.console.print(f"step {line['step']}/{self._steps}  {text}  {left:.0f} s left", highlight=False)


def describe(line: Mapping[str, Any]) -> str:
    parts = [f"loss {line['loss']:.3f}" + (f" (ln K {line['ln_k']:.2f})" if "ln_k" in line else "")]
    if "active" in line:
        parts += [f"active {line['active']:.2%}", f"{line['flips']:.0f} flips/step"]
    if "accuracy" in line:
        parts.append(f"accuracy {line['accuracy']:.3f}")
    if "quality" in line:
        parts.append(f"quality {line['quality']:.3f}")
    return "  ".join([*parts, f"{line['images_per_second']:.0f} images/s"])
