"""Runs studies: every task once, whichever studies ask for it, in the order that they need each other."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from ..backbones import Backbone, load_backbone
from ..commands.cells import DIVERGED, FAILED, Cells
from ..data import Images, SomeImages, label_split
from ..data.partition import open_labelled
from ..embedding.cache import FeatureCache
from ..errors import ConfigError, DataUnavailableError, NeededCellError, RunBusyError, RunWriteError
from ..files import RunFile, write_atomically
from ..training import RunFolder
from ..training.display import StagesDisplay
from .scale import Scale
from .study import Entry, Study
from .tasks import Pretrain, Subject, Task


@dataclasses.dataclass(frozen=True)
class Part:
    """One of several equal parts of the work, counted from 1: "2/3"."""

    index: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, numbers: Sequence[Entry]) -> list[Task]:
        """Its share of the tasks that leave these numbers."""
        return list(dict.fromkeys(number.task for number in numbers))[self.index - 1 :: self.count]

    @classmethod
    def named(cls, text: str | None) -> list[Part]:
        """One part, or all of them: "all/3". Without a name, all of the work in one."""
        found = re.fullmatch(r"(all|[0-9]{1,5})/([0-9]{1,5})", text or "all/1")
        which, count = (found[1], int(found[2])) if found else ("", 0)
        if not count or (which != "all" and not 1 <= int(which) <= count):
            raise ConfigError(
                "a shard is not a part of the work", expected="such as 1/2, 2/2 or all/2", found=repr(text)
            )
        return [cls(index, count) for index in (range(1, count + 1) if which == "all" else [int(which)])]


class Tasks(Cells[Task]):
    """Runs tasks in one folder, which several processes may share."""

    goes_on = True

    def __init__(self, folder: Path, display: StagesDisplay) -> None:
        super().__init__(folder, display)
        self._images: dict[tuple[str, int | None], tuple[Images, Images]] = {}

    def begin(self) -> None:
        """Mark the folder as ours, or refuse one of other files; others may be at work in it."""
        with suppress(RunBusyError):  # by somebody who does just that
            RunFolder(self.folder, resume=True).close()

    def backbone(self, subject: Subject) -> Backbone:
        return load_backbone(subject.backbone, weights=self.weights(subject))

    def weights(self, subject: Subject) -> Path | None:
        if subject.start is not None:
            before = Pretrain(dataclasses.replace(subject, start=None), subject.start)
            return self.place(before) / subject.start.weights_file
        return None if subject.weights is None else Path(subject.weights)

    def labelled(self, subject: Subject) -> tuple[Images, Images]:
        key = subject.data, subject.most_images
        if key not in self._images:
            train, test = open_labelled(subject.data)
            self._images[key] = _at_most(train, subject.most_images), test
        return self._images[key]

    @cached_property
    def features(self) -> FeatureCache:
        """Features of frozen backbones, above all, that many tasks ask for."""
        return FeatureCache(self.folder / "features", self.display.say)

    def cost(self, cell: Task) -> float:
        try:
            return cell.cost(len(self.labelled(cell.subject)[0]))
        except DataUnavailableError:  # the cell will say so itself, and others have their data
            return 0.0

    def label(self, cell: Task) -> str:
        return f"{cell.title} ({cell.name[-4:]})"  # cells of a grid may differ in what no title says

    def is_ready(self, cell: Task) -> bool:
        return all(map(self.is_known, cell.needs))

    def run(self, cell: Task) -> None:
        for needed in cell.needs:
            if reason := self.trouble(needed):
                raise NeededCellError(f"{needed.title} did not come to an end", found=reason)
        place = self.place(cell)
        place.mkdir(parents=True, exist_ok=True)
        began, used = time.perf_counter(), time.process_time()
        cell.run(place, self)
        took = {"seconds": time.perf_counter() - began, "core_seconds": time.process_time() - used}
        write_atomically(place / RunFile.TOOK, json.dumps(took).encode(), RunWriteError)

    def trouble(self, cell: Task) -> str | None:
        """Why there is no result; None where there is one."""
        found = self.result(cell)
        return found.get(FAILED) or found.get(DIVERGED)


def _at_most(images: Images, most: int | None) -> Images:
    """All of them, or a part that is always the same."""
    if most is None or most >= len(images):
        return images
    return SomeImages(images, label_split(images.labels or [], most / len(images), seed=0))


def in_order(tasks: Iterable[Task]) -> Iterator[Task]:
    """Each task once, after those that it needs."""
    seen = set[Task]()

    def visit(task: Task) -> Iterator[Task]:
        if task not in seen:
            seen.add(task)
            for needed in task.needs:
                yield from visit(needed)
            yield task

    for task in tasks:
        yield from visit(task)


@dataclasses.dataclass(frozen=True)
class Findings:
    """The numbers of a study that there are, and why others are missing."""

    study: Study
    scale: Scale
    values: dict[Entry, float]
    missing: dict[Entry, str]
    place: Callable[[Task], Path] = dataclasses.field(default=lambda task: Path(task.name))
    """Where a task left what it found."""


def run_study(study: Study, scale: Scale, tasks: Tasks, parts: Sequence[Part] = (Part(),)) -> Findings:
    """Run what is not there yet, or some parts of it, and read all numbers that there are."""
    numbers = study.entries(scale)
    tasks.run_all(list(in_order(task for part in parts for task in part.of(numbers))))
    return findings(study, scale, tasks, numbers)


def is_left(study: Study, scale: Scale, tasks: Tasks, part: Part) -> bool:
    """Whether a part of the study is still to be run."""
    return not all(map(tasks.is_finished, part.of(study.entries(scale))))


def findings(study: Study, scale: Scale, tasks: Tasks, numbers: Sequence[Entry] | None = None) -> Findings:
    """What there is of a study, without running anything."""
    values, missing = dict[Entry, float](), dict[Entry, str]()
    for number in study.entries(scale) if numbers is None else numbers:
        why = tasks.trouble(number.task) if tasks.is_known(number.task) else "not run yet"
        value = None if why else number.read(tasks.result(number.task))
        if value is None:
            missing[number] = why or "not measured"
        elif isinstance(value, Mapping):
            values |= {dataclasses.replace(number, x=x): float(each) for x, each in value.items()}
        else:
            values[number] = float(value)
    return Findings(study, scale, values, missing, tasks.place)
