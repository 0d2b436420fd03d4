"""The one runner of grids: cells of a comparison or a study, each with a folder of its own.

What is finished is not run again; several processes, here or on other machines, may share one folder and divide the
work cell by cell.
"""

from __future__ import annotations

import gc
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ..errors import DivergedRunError, InterruptedRunError, RunBusyError, RunWriteError, SelfmaskError
from ..files import RunFile, write_atomically
from ..locks import Lock
from ..training import RunFolder
from ..training.display import StagesDisplay

FAILED, DIVERGED = "failed", "diverged"
"""Keys of results of cells that did not come to an end, with the reason."""
_PAUSE = 2.0  # seconds between two looks at cells that others are running


class AnyCell(Hashable, Protocol):
    """One run, or one measurement."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...


C = TypeVar("C", bound=AnyCell)


class Cells(ABC, Generic[C]):
    """Runs cells of one kind."""

    goes_on: ClassVar[bool] = False
    """Whether a cell that fails is recorded as failed, and the others are run."""

    def __init__(self, folder: Path, display: StagesDisplay) -> None:
        self.folder, self.display = folder, display

    def begin(self) -> None:
        """Called before the first cell is run."""

    @abstractmethod
    def cost(self, cell: C) -> float:
        """In steps, or what takes as long."""

    @abstractmethod
    def run(self, cell: C) -> None:
        """Leave a result in the cell's folder."""

    def run_all(self, cells: Sequence[C]) -> dict[C, dict[str, Any]]:
        """The results of all; those that are not there yet are run, in this order, unless somebody else runs them."""
        costs = {self.label(cell): self.cost(cell) for cell in cells}
        self.begin()
        with self.display.stages(costs, [self.label(cell) for cell in cells if self.is_finished(cell)]):
            left = [cell for cell in cells if not self.is_finished(cell)]
            while left:
                busy = [cell for cell in left if not self._ran(cell)]
                if len(busy) == len(left):
                    time.sleep(_PAUSE)
                left = [cell for cell in busy if not self.is_finished(cell)]
        return {cell: self.result(cell) for cell in cells}

    def _ran(self, cell: C) -> bool:
        """Run a cell; not if somebody else does, or runs what it needs, which is False."""
        if not self.is_ready(cell):
            return False
        with self._taken(cell) as taken:
            if taken and not self.is_finished(cell):
                with self.display.stage(self.label(cell)):
                    self._try(cell)
                gc.collect()  # models with graphs refer to themselves
        return taken

    def _try(self, cell: C) -> None:
        failed = self.place(cell) / RunFile.FAILED
        failed.unlink(missing_ok=True)
        try:
            self.run(cell)
        except (InterruptedRunError, RunBusyError, RunWriteError):  # nothing that the cell is to blame for
            raise
        except SelfmaskError as error:
            if not self.goes_on:
                raise
            # Who diverges will again, and that is a result; anything else may be mended.
            key, file = (DIVERGED, RunFile.RESULT) if isinstance(error, DivergedRunError) else (FAILED, RunFile.FAILED)
            write_atomically(self.place(cell) / file, json.dumps({key: str(error)}).encode(), RunWriteError)
            self.display.say(f"{self.label(cell)} {key}: {error.what}")

    @contextmanager
    def _taken(self, cell: C) -> Iterator[bool]:
        """Within, nobody else runs the cell, if it is True."""
        place = self.place(cell)
        try:
            lock = Lock(place.with_name(f"{place.name}.lock"), place)
        except RunBusyError:
            yield False
            return
        try:
            yield True
        finally:
            lock.close(remove=True)

    def label(self, cell: C) -> str:
        """What it is called on the display; no two cells may share one."""
        return cell.title

    def is_ready(self, cell: C) -> bool:
        """Whether all that it needs is there."""
        return True

    def place(self, cell: C) -> Path:
        return self.folder / RunFile.CELLS / cell.name

    def is_finished(self, cell: C) -> bool:
        return (self.place(cell) / RunFile.RESULT).exists()

    def is_known(self, cell: C) -> bool:
        """Whether it was run, whatever came of it."""
        return self.is_finished(cell) or (self.place(cell) / RunFile.FAILED).exists()

    def result(self, cell: C) -> dict[str, Any]:
        """What came out of a cell, or why nothing did."""
        place = self.place(cell)
        return RunFolder.read_json(place / (RunFile.RESULT if self.is_finished(cell) else RunFile.FAILED))
