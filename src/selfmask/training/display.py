"""What a run tells whoever watches it; how that is shown is theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

Count = Callable[[int, int], None]


class Display(Protocol):
    """Watches one run."""

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


class StagesDisplay(QuietDisplay):
    """Watches a job of many stages, some of which are runs: how far each is, weighed by what it costs. Says nothing."""

    def __init__(self) -> None:
        self.costs: Mapping[str, float] = {}
        self.shares: dict[str, float] = {}
        """How far each stage is, from 0 to 1."""
        self._before = self._start = 0.0  # what earlier processes had done, and when this one began
        self._stage: str | None = None
        self._steps = 1

    @contextmanager
    def stages(self, costs: Mapping[str, float], finished: Collection[str]) -> Iterator[None]:
        """Within, stages of these names run; the cost of each is in any unit. `finished` were done before."""
        self.costs, self._start = costs, time.monotonic()
        self.shares = {name: float(name in finished) for name in costs}
        self._before = self.done
        if finished:
            self.say(f"{len(finished)} of {len(costs)} are already finished")
        yield

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run one stage; `line`, `share` and `count` then are about it."""
        self._stage, start = name, time.monotonic()
        self.share(0.0)
        yield
        self.finished(name, time.monotonic() - start)
        self._stage = None

    def finished(self, name: str, seconds: float) -> None:
        """A stage has ended, here or elsewhere."""
        self.share(1.0, name)
        took, done = time.monotonic() - self._start, self.done
        left = (sum(self.costs.values()) - done) * took / max(done - self._before, 1e-9)
        count = sum(share == 1 for share in self.shares.values())
        self.say(f"{count}/{len(self.costs)}  {name}: {seconds:.0f} s; about {duration(left)} left")

    def share(self, share: float, name: str | None = None) -> None:
        """How far a stage is: this one, or one that runs elsewhere."""
        name = name or self._stage
        if name is not None and name in self.costs:
            self.shares[name] = min(1.0, share)

    @property
    def done(self) -> float:
        """What all stages together have done, in the unit of the costs."""
        return sum(cost * self.shares[name] for name, cost in self.costs.items())

    def count(self, done: int, total: int) -> None:
        """How far this stage is, in images."""
        self.share(done / max(1, total))

    @contextmanager
    def training(self, steps: int) -> Iterator[None]:
        self._steps = steps
        yield

    def line(self, line: Mapping[str, Any]) -> None:
        self.share(line["step"] / self._steps * 0.99)  # what comes after the last step takes a moment, too


def duration(seconds: float) -> str:
    """A time as people say it."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
