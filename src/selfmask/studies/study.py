"""What a study is: numbers that tasks leave, in a grid of settings, data sets and seeds, beside those of the paper."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..errors import ConfigError
from .scale import Case, Scale
from .tasks import Task

Result = Mapping[str, Any]
Curve = Mapping[float | None, float]
"""Numbers by their place, where only a result tells how many there are; at None, one that stands for all."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One number of a study: where it stands in the table, and how it is read from what a task left; or all of a curve.

    setting, measure: its row, and what is measured, in the words that the paper's numbers have.
    case: backbone and data set, and those of the paper that they stand for. x: its place on a curve; paper_x: that of
    the paper's number, where it is another. seed: which repetition it is. steps: how long its run was.
    """

    case: Case
    setting: str
    measure: str
    task: Task
    read: Callable[[Result], float | Curve | None]
    x: float | None = None
    paper_x: float | None = None
    seed: int = 0
    steps: int = 0


@dataclasses.dataclass(frozen=True)
class Claim:
    """What the paper says of its numbers: one setting is better than another, on the mean of all data.

    measures: what both are measured by, or what each is. x: where curves are compared; None where there is no curve.
    equal: it says that both are the same; then, that they are within the spread over seeds.
    """

    text: str
    measures: Sequence[str]
    better: str
    worse: str
    x: float | None = None
    equal: bool = False


class Study(ABC):
    """A table or a figure of the paper."""

    name: ClassVar[str]
    title: ClassVar[str]
    """What it shows, and where the paper does."""
    claims: ClassVar[Sequence[Claim]] = ()

    @abstractmethod
    def entries(self, scale: Scale) -> list[Entry]:
        """All numbers, in the order of the table."""

    def draw(self, found: Mapping[Entry, float], folder: Path, place: Callable[[Task], Path]) -> Sequence[str]:
        """Draw figures into the folder; the names of their files. By default there are none.

        place: where a task left what it found.
        """
        return ()


STUDIES: dict[str, Study] = {}
T = TypeVar("T", bound=type[Study])


def register(study: T) -> T:
    """Make a study known by its name."""
    if type(STUDIES.setdefault(study.name, study())) is not study:
        raise ConfigError(f"there are two studies named {study.name!r}")
    return study
