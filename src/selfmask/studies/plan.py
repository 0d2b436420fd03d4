"""What studies would take: cells, steps, hours of a GPU or minutes of a laptop's core, and bytes on the disk."""

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
from .tasks import Adapt, Cascade, Measure, Pretrain, Subject, Task, Train

_HOURS, _STEPS = 24.0, 117_188  # "less than 24 hours" for a run of so many steps without labels, on an A100
_VIEWS = 2 * 224**2 + 6 * 96**2  # pixels a side, of such a step for each image
_PIXELS = 224**2
_WEIGHTS = {False: 25_000_000, True: 1_200_000}  # of a ResNet-50; in miniature, of the bundled backbone
_COPIES = 4 * 4  # bytes in a checkpoint for each: a score, its momentum, and both once more while one is written


# What a core of a laptop takes for an image, with the bundled backbone: as cells say that they took.
_A_PASS, _A_LEARNED_VIEW = 0.0011, 0.0034  # seconds: of embedding, and of a step for each view
_A_CELL, _A_REPORT = 0.5, 15.0  # seconds: of opening and closing; of the pictures of a cascade
_TESTED = 1000  # images


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all cells of studies take together.

    hours: of a GPU: at most, by the paper's own account. minutes: of one core, in miniature.
    """

    cells: dict[str, int]
    steps: int
    hours: float
    minutes: float
    bytes: int


def plan(studies: Sequence[Study], scale: Scale) -> Plan:
    """Of all their cells, each once, whether they are finished or not."""
    tasks = list(in_order(entry.task for study in studies for entry in study.entries(scale)))
    cells: dict[str, int] = {}
    for task in tasks:
        cells[task.verb] = cells.get(task.verb, 0) + 1
    images = {task: images_of(task.subject) for task in tasks}
    steps = {task: _steps(task, images[task]) for task in tasks}
    hours = sum(_hours(task, count) for task, count in steps.items())
    seconds = sum(_seconds(task, count, images[task]) for task, count in steps.items())
    runs: Sequence[Task] = [task for task, count in steps.items() if count]
    size = len(runs) * _WEIGHTS[scale.in_miniature] * _COPIES
    return Plan(cells, sum(steps.values()), hours, seconds / 60, size)


def images_of(subject: Subject) -> int:
    """How many training images are used: all that there are, or as many as the study takes."""
    count = _images(subject.data)
    return count if subject.most_images is None else min(count, subject.most_images)


@cache
def _images(data: str) -> int:
    """Of a data set: as the paper divided it, or as it is here."""
    published = {facts.name: next(iter(facts.splits.values())) for facts in PAPER}.get(data)
    return published[0] if isinstance(published, tuple) else len(open_labelled(data)[0])


def _steps(task: Task, images: int) -> int:
    if isinstance(task, Adapt | Pretrain):
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


def _seconds(task: Task, steps: int, images: int) -> float:
    """Of one core: by the images that are learned from, and those that only pass the network."""
    if isinstance(task, Adapt):
        views = task.config.chosen_views
        learned = steps * task.config.batch_size * (views.large + views.small / 4)
        passes = 3 * min(images, task.config.most_images or images)  # both sides for the heads, once for the map
    elif isinstance(task, Train):
        learned, passes = steps * task.config.batch_size, round(images * task.config.label_fraction) + 2 * _TESTED
    elif isinstance(task, Pretrain):
        learned, passes = steps * task.config.batch_size * (1 if task.config.labels else 2), 0
    elif isinstance(task, Cascade):
        views = task.config.adapt.chosen_views
        learned = steps * task.config.adapt.batch_size * (views.large + views.small / 4)
        passes = images * (task.config.experts + 3)
    else:
        learned, passes = 0, images + _TESTED if isinstance(task, Measure) else 0
    more = _A_REPORT if isinstance(task, Cascade) else 0.0
    return _A_CELL + more + learned * _A_LEARNED_VIEW + passes * _A_PASS
