"""The cells of a comparison, each with a folder of its own: what is finished there is not run again."""

from __future__ import annotations

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
from .adapt import AdaptConfig, AdaptResult, adapt


class AnyCell(Hashable, Protocol):
    """One run of a comparison, or one measurement."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...


C = TypeVar("C", bound=AnyCell)


class Cells(ABC, Generic[C]):
    """Runs cells of one kind.

    load: makes the backbone anew; methods change it.
    """

    def __init__(
        self,
        load: Callable[[], Backbone],
        images: Images,
        folder: Path,
        display: StagesDisplay,
        weights: str | None,
        max_bad: float,
    ) -> None:
        self.load, self.images, self.folder = load, images, folder
        self.display, self.weights, self.max_bad = display, weights, max_bad

    @abstractmethod
    def cost(self, cell: C) -> int:
        """In steps, or what takes as long."""

    @abstractmethod
    def run(self, cell: C) -> None:
        """Leave a result in the cell's folder."""

    def run_all(self, cells: Sequence[C]) -> dict[C, dict[str, Any]]:
        """The results of all; those that are not there yet are run, in this order."""
        costs = {cell.title: self.cost(cell) for cell in cells}
        with self.display.stages(costs, [cell.title for cell in cells if self.is_finished(cell)]):
            for cell in cells:
                if not self.is_finished(cell):
                    with self.display.stage(cell.title):
                        self.run(cell)
                    gc.collect()  # models with graphs refer to themselves
        return {cell: RunFolder.read_json(self.place(cell) / RunFile.RESULT) for cell in cells}

    def place(self, cell: C) -> Path:
        return self.folder / RunFile.CELLS / cell.name

    def is_finished(self, cell: C) -> bool:
        return (self.place(cell) / RunFile.RESULT).exists()

    def adapted(self, backbone: Backbone, config: AdaptConfig, out: Path, *, report: bool = True) -> AdaptResult:
        """Adapt to all training images without labels, or take what is there."""
        return adapt(
            backbone.model,
            self.images,
            config,
            out=out,
            resume=True,
            preprocessing=backbone.preprocessing,
            about={"backbone": backbone.name, "weights": self.weights},
            max_bad=self.max_bad,
            report=report,
            display=self.display,
        )
