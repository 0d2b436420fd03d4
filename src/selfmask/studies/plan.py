"""What a study would take: cells, steps, hours of a GPU, and bytes on the disk; nothing is opened for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache

from ..data.catalogue import PAPER
from ..data.partition import open_labelled
from ..training.config import RunConfig
from .runner import in_order
from .scale import Scale
from .study import Study
from .tasks import Adapt, Cascade, Task, Train

_HOURS, _STEPS = 24.0, 117_188  # "less than 24 hours" for a run of so many steps without labels, on an A100
_VIEWS = 2 * 224**2 + 6 * 96**2  # pixels a side, of such a step for each image
_PIXELS = 224**2
_WEIGHTS = 25_000_000  # of a ResNet-50
_COPIES = 4 * 4  # bytes in a checkpoint for each: a score, its momentum, and both once more while one is written


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all cells of a study take together. hours: at most, by the paper's own account."""

    cells: dict[str, int]
    steps: int
    hours: float
    bytes: int


def plan(study: Study, scale: Scale) -> Plan:
    """Of all its cells, whether they are finished or not."""
    tasks = list(in_order(entry.task for entry in study.entries(scale)))
    cells: dict[str, int] = {}
    for task in tasks:
        cells[task.verb] = cells.get(task.verb, 0) + 1
    steps = {task: _steps(task, images_of(task.subject.data)) for task in tasks}
    hours = sum(_hours(task, count) for task, count in steps.items())
    runs: Sequence[Task] = [task for task, count in steps.items() if count]
    return Plan(cells, sum(steps.values()), hours, len(runs) * _WEIGHTS * _COPIES)


@cache
def images_of(data: str) -> int:
    """How many training images a data set has: as the paper divided it, or as it is here."""
    published = {facts.name: next(iter(facts.splits.values())) for facts in PAPER}.get(data)
    return published[0] if isinstance(published, tuple) else len(open_labelled(data)[0])


def _steps(task: Task, images: int) -> int:
    if isinstance(task, Adapt):
        return _of(task.config, images)
    if isinstance(task, Train):
        return _of(task.config, max(1, round(images * task.config.label_fraction)))
    if isinstance(task, Cascade):
        each = task.config.expert_images
        own = _of(task.config.adapt, images) if each is None else each // task.config.adapt.batch_size
        return task.config.experts * own
    return 0


def _of(config: RunConfig, images: int) -> int:
    return config.number_of_steps(max(1, images // config.batch_size))


def _hours(task: Task, steps: int) -> float:
    """By the pixels that pass the network."""
    share = _PIXELS / _VIEWS if isinstance(task, Train) else 1.0
    return steps / _STEPS * _HOURS * share
