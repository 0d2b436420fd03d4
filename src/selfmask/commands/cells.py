"""The cells of a comparison, each with a folder of its own: what is finished there is not run again."""

from __future__ import annotations

import dataclasses
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ..backbones import Backbone
from ..data import Images
from ..files import RunFile
from ..training import RunFolder
from ..training.display import StagesDisplay
from .adapt import AdaptResult, adapt
from .adapt_config import AdaptConfig


class AnyCell(Hashable, Protocol):
    """One run of a comparison, or one measurement."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...


C = TypeVar("C", bound=AnyCell)


@dataclasses.dataclass(frozen=True)
class Job:
    """What all cells of a comparison share.

    load: makes the backbone anew; methods change it.
    """

    load: Callable[[], Backbone]
    images: Images
    folder: Path
    display: StagesDisplay
    weights: str | None
    max_bad: float


class Cells(ABC, Generic[C]):
    """Runs cells of one kind."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @abstractmethod
    def cost(self, cell: C) -> int:
        """In steps, or what takes as long."""

    @abstractmethod
    def run(self, cell: C) -> None:
        """Leave a result in the cell's folder."""

    def run_all(self, cells: Sequence[C]) -> dict[C, dict[str, Any]]:
        """The results of all; those that are not there yet are run, in this order."""
        costs = {cell.title: self.cost(cell) for cell in cells}
        with self.job.display.stages(costs, [cell.title for cell in cells if self.is_finished(cell)]):
            for cell in cells:
                if not self.is_finished(cell):
                    with self.job.display.stage(cell.title):
                        self.run(cell)
                    gc.collect()  # models with graphs refer to themselves
        return {cell: RunFolder.read_json(self.place(cell) / RunFile.RESULT) for cell in cells}

    def place(self, cell: C) -> Path:
        return self.job.folder / RunFile.CELLS / cell.name

    def is_finished(self, cell: C) -> bool:
        return (self.place(cell) / RunFile.RESULT).exists()

    def adapted(self, backbone: Backbone, config: AdaptConfig, out: Path, *, report: bool = True) -> AdaptResult:
        """Adapt to all training images without labels, or take what is there."""
        return adapt(
            backbone.model,
            self.job.images,
            config,
            out=out,
            resume=True,
            preprocessing=backbone.preprocessing,
            about={"backbone": backbone.name, "weights": self.job.weights},
            max_bad=self.job.max_bad,
            report=report,
            display=self.job.display,
        )
