"""What a run tells whoever watches it; how that is shown is theirs."""

from __future__ import annotations

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


class StagesDisplay(Display, Protocol):
    """Watches a job of many stages, some of which are runs."""

    def stages(self, costs: Mapping[str, float], finished: Collection[str]) -> AbstractContextManager[None]:
        """Within, stages of these names run; the cost of each is in any unit. `finished` were done before."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Run one stage; `line`, `share` and `count` then are about it."""

    def finished(self, name: str, seconds: float) -> None:
        """A stage has ended, here or elsewhere."""

    def share(self, share: float, name: str | None = None) -> None:
        """How far a stage is, from 0 to 1: this one, or one that runs elsewhere."""

    def count(self, done: int, total: int) -> None:
        """How far this stage is, in images."""


class QuietDisplay:
    """Says nothing, of a run or of stages."""

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

    @contextmanager
    def stages(self, costs: Mapping[str, float], finished: Collection[str]) -> Iterator[None]:
        yield

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        yield

    def finished(self, name: str, seconds: float) -> None:
        pass

    def share(self, share: float, name: str | None = None) -> None:
        pass

    def count(self, done: int, total: int) -> None:
        pass
