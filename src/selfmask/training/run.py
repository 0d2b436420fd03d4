"""One run from images to result: the course that every verb takes. Each verb fills it with a recipe of its own.

images -> backbone -> folder -> batches -> objective -> loop -> finish
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..data import Images, ImageStore
from ..data.identity import Unchanged
from ..data.pixels import fit, normalised
from ..data.views import MultiCrop, ViewsConfig
from ..errors import InterruptedRunError, TooFewImagesError, TooManyBadImagesError
from ..files import RunFile
from ..masking import MaskedModel
from ..objectives import Objective
from ..preprocessing import Preprocessing
from ..running import as_vectors, features_of, small_side
from .batches import Steps
from .budget import Speed
from .config import Precision, RunConfig, seconds_of
from .display import Display, QuietDisplay
from .folder import RunFolder, open_folder
from .guard import Guard
from .loop import ParameterGroup, train
from .methods import Learner
from .precision import chosen
from .processes import Processes
from .seeds import generator
from .trackers import Trackers

_AT_ONCE = 128  # images in a forward pass
_CACHE_SIDE = 2  # cached images keep twice the pixels of a large crop a side: small crops stay sharp

Watch = Callable[[nn.Module, Mapping[str, Any]], None]
"""Called with the model and each line of the log."""


class Recipe(ABC):
    """What a verb fills the course of a run with; asked in this order."""

    verb: ClassVar[str]
    with_labels: ClassVar[bool] = False
    with_numbers: bool = False
    config: RunConfig
    preprocessing: Preprocessing

    @abstractmethod
    def images(self) -> Images:
        """What is learned from."""

    @abstractmethod
    def learner(self) -> Learner:
        """The model, and what of it learns."""

    @abstractmethod
    def views(self) -> ViewsConfig:
        """What is made of an image; the size is that of the preprocessing."""

    def facts(self, learner: Learner) -> dict[str, Any]:
        """What decides the result besides settings, images and the number of processes."""
        return {}

    def held_out(self, names: Sequence[str], by_name: bool) -> list[int]:
        """Numbers of the images that are not trained on: chosen by their names, or by their places among the others."""
        return []

    def batch_size(self, count: int, processes: Processes) -> int:
        """How many of so many images make a batch."""
        return self.config.batch_size

    @abstractmethod
    def objective(self, run: Run) -> Objective: ...

    @abstractmethod
    def groups(self, run: Run, objective: Objective) -> list[ParameterGroup]:
        """The parameters that learn, and how fast."""

    def guard(self, run: Run) -> Guard | None:
        """Who watches over the run, if anybody."""
        return None

    def settled(self, run: Run) -> Learner:
        """What is left when the loop has ended: what learned, if nothing takes its place."""
        return run.learner

    @abstractmethod
    def leaves(self) -> Sequence[str]:
        """The files without which the run is not finished."""

    @abstractmethod
    def finish(self, run: Run) -> dict[str, Any]:
        """Write what came out; the numbers of the result. Only in the process that has the folder."""


@dataclasses.dataclass
class Run:
    """What is known of a run once its images are decoded."""

    recipe: Recipe
    images: Images
    learner: Learner
    features: int
    store: ImageStore
    held_out: Sequence[int]
    batches: Steps
    steps: int
    processes: Processes
    display: Display
    folder: RunFolder | None
    began: float
    """On the clock, less the time spent in the loop: that is in the log, also of earlier processes."""
    guard: Guard | None = None
    objective: Objective | None = None

    @cached_property
    def reference(self) -> list[Tensor]:
        """One batch of views, twice as large as a step's, that stands for what is trained on."""
        among, seed = self.batches.among, self.recipe.config.seed
        count = min(2 * self.batches.batch_size, len(among))
        place = torch.randperm(len(among), generator=generator(seed, "reference"))[:count]
        images = self.store.batch(among[place].tolist())
        views = self.batches.views(images, self.batches.views.draw(count, generator(seed, "reference views")))
        return [views[0].to(self.processes.device, memory_format=torch.channels_last)]

    @torch.inference_mode()
    def vectors(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        """Features of all images that are trained on, in the order of their numbers; means of each and its mirror."""
        found = []
        for numbers in torch.split(self.batches.among, _AT_ONCE):
            images = [fit(image, self.recipe.preprocessing) for image in self.store.batch(numbers.tolist())]
            pixels = normalised(torch.stack(images), self.recipe.preprocessing)
            pixels = pixels.to(self.processes.device, memory_format=torch.channels_last)
            found.append((as_vectors(model(pixels)).float() + as_vectors(model(pixels.flip(-1))).float()) / 2)
        return torch.cat(found)

    def seconds(self) -> float:
        """What the run took so far, all its processes together."""
        logged = sum(line.get("seconds", 0.0) for line in self.folder.read_log()) if self.folder else 0.0
        return logged + time.perf_counter() - self.began


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run leaves behind: the model in eval mode, the numbers of `result.json`, and the log."""

    learner: Learner
    objective: Objective
    result: dict[str, Any]
    log: list[dict[str, Any]]


def run(
    recipe: Recipe,
    *,
    out: str | Path | None,
    resume: bool,
    about: Mapping[str, Any],
    max_bad: float = 0.05,
    display: Display | None = None,
    watch: Watch | None = None,
    dry: bool = False,
) -> Outcome:
    """Take the whole course; with `resume`, from where a run in `out` was cut short.

    about: what the run folder should say besides settings: the names of backbone, weights and images.
    dry: stop before the loop; the result then is what the run would take, and `out` is left alone.
    """
    processes, display, began = Processes(), display or QuietDisplay(), time.perf_counter()
    images = recipe.images()  # before the folder: a typo in a path leaves nothing behind
    learner, config = recipe.learner(), recipe.config
    learner.model.to(processes.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    size = recipe.preprocessing.size[0]
    features = features_of(learner.model, size)
    views = MultiCrop(_fitted(recipe.views(), learner.model, size, display), recipe.preprocessing)
    with (
        _place(None if dry else out) as place,
        open_folder(place, resume, processes) as folder,
        Trackers(config.track, place if folder else None) as trackers,
    ):
        same = Unchanged(images) if folder else None
        content = processes.from_main(lambda: same.content if same else None)
        store = decoded(images, size, max_bad, display, folder, content, same.holds if same else None)
        by_name = processes.from_main(lambda: _by_name(images, folder))
        held_out = recipe.held_out(store.names, by_name)
        batches = Steps(
            store,
            views,
            batch_size=recipe.batch_size(len(store) - len(held_out), processes),
            seed=config.seed,
            processes=processes,
            with_labels=recipe.with_labels,
            with_numbers=recipe.with_numbers,
            among=sorted(set(range(len(store))) - set(held_out)),
        )
        current = Run(recipe, images, learner, features, store, held_out, batches, 0, processes, display, folder, began)
        beside = learner.beside
        if beside is not None and beside.config.norm == "anchored":
            beside.anchor(current.reference)
        precision = _precision(current)
        current.steps = steps = _length(current, precision)
        known = {"steps": steps, "size": size, "processes": processes.count, "precision": precision}
        facts = {**known, **recipe.facts(learner), **({"held_out": "by name"} if by_name and held_out else {})}
        processes.from_main(
            lambda: (
                folder.begin(
                    {"verb": recipe.verb, **about, "max_bad": max_bad},
                    config.to_dict(),
                    {"data": same.content[:16], **facts},
                )
                if folder and same
                else None
            )
        )
        current.objective = objective = recipe.objective(current).to(processes.device)
        groups = recipe.groups(current, objective)
        current.guard = guard = recipe.guard(current)
        if dry:
            speed = Speed.measure(learner.model, batches, processes.device, precision)
            state = learner.kept(), [group.parameters for group in groups], objective.state_dict()
            return Outcome(learner, objective, speed.plan(steps, len(store), state), [])
        if same is not None:
            same.check()  # all was decoded, and heads may have been fitted to images, since
        reports = [display.line, trackers.line]
        if watch is not None:
            reports.append(lambda line: watch(learner.model, line))
        before = time.perf_counter()
        with display.training(steps), _told_where(out):
            exact = config.changed(precision=precision)
            train(learner.model, objective, groups, batches, steps, exact, folder, processes, reports, guard)
        current.began += time.perf_counter() - before
        if same is not None and not store.cached:  # images were read all the time
            same.check()
        # With a guard, the best point has its statistics already.
        if beside is not None and guard is None and beside.config.norm in ("anchored", "recalibrate"):
            beside.recalibrate(current.reference)
        current.learner = learner = recipe.settled(current)
        if (masked := learner.masked) is not None and (off := all_off(masked)):
            display.say(f"warning: every weight is off in {', '.join(off[:3])}{' and more' if off[3:] else ''}")
        learner.model.eval()
        objective.eval()
        result, log = {}, list[dict[str, Any]]()
        if folder is not None:
            result, log = folder.result or {}, folder.read_log()
            if not result or not all((folder.path / name).exists() for name in recipe.leaves()):
                result = recipe.finish(current)
                if learner.masked is not None:
                    result["all_off"] = all_off(learner.masked)
                if store.bad:
                    folder.write_json(RunFile.BAD_IMAGES, dict(store.bad))
                folder.write_json(RunFile.RESULT, result)  # last: where that is, the run is finished
    return Outcome(learner, objective, result, log)


def _by_name(images: Images, folder: RunFolder | None) -> bool:
    """Whether names choose what is held out: the same images, however many shards there are and in which order.

    Runs that began before that was so go on as they began.
    """
    return images.own_names and (folder is None or folder.begun_by_name is not False)


def _precision(current: Run) -> Precision:
    """What a run computes with is decided once: it may be resumed on another machine."""
    config, folder, model = current.recipe.config, current.folder, current.learner.model

    def decided() -> Precision:
        begun = folder.begun_precision if folder and config.precision == "auto" else None
        return begun or chosen(config.precision, model, current.processes.device)

    return current.processes.from_main(decided)


def _length(current: Run, precision: Precision) -> int:
    """How many steps there will be; what follows from a budget is decided once, so that a resumed run ends the same."""
    config, folder = current.recipe.config, current.folder
    if config.budget is None:
        return config.number_of_steps(current.batches.per_epoch)

    def measured() -> int:
        begun = folder.begun_steps if folder else None
        if begun is not None:
            return begun
        speed = Speed.measure(current.learner.model, current.batches, current.processes.device, precision)
        left = seconds_of(config.budget or "") - (time.perf_counter() - current.began)
        return speed.steps_within(left, len(current.store))

    return current.processes.from_main(measured)


def decoded(
    images: Images,
    size: int,
    max_bad: float,
    display: Display,
    folder: RunFolder | None,
    content: str | None,
    holds: Callable[[], bool] | None,
) -> ImageStore:
    """All images decoded, with a display of how far it is; what cannot be learned from is refused."""
    try:
        with display.decoding(len(images)) as progress:
            side = _CACHE_SIDE * size
            store = ImageStore(images, side=side, max_bad=max_bad, progress=progress, content=content, holds=holds)
    except TooManyBadImagesError as error:
        if folder is not None:
            folder.write_json(RunFile.BAD_IMAGES, dict(error.bad))
        raise
    if folder is not None and store.bad:
        folder.write_json(RunFile.BAD_IMAGES, dict(store.bad))
    first = store[0]
    if all(torch.equal(first, store[i]) for i in range(1, len(store))):
        raise TooFewImagesError(
            "there are too few different images",
            expected="many different images",
            found=f"{len(store)} image(s)" + (", all identical" if len(store) > 1 else ""),
            todo="check the folder; use at least a few hundred different images",
        )
    return store


def all_off(masked: MaskedModel) -> list[str]:
    """The tensors of which no weight is left: what they compute is lost, which no loss need show."""
    return [name for name, share in masked.sparsity().items() if share == 0]


def score_group(masked: MaskedModel, config: RunConfig, lr: float, steps: int, start: float = 0.0) -> ParameterGroup:
    """The scores of a mask. They never decay, and begin to learn after the share `start` of the run."""
    rate = score_rate(lr, config.momentum, steps) if config.per_tensor else lr
    return ParameterGroup(
        list(masked.scores.parameters()),
        rate,
        per_tensor=config.per_tensor,
        start=start,
        together=masked.layers(),
    )


def weighted_layers(masked: MaskedModel) -> int:
    """Number of layers whose weights carry scores; a layer counts once, into however many tensors it is cut."""
    return max(1, sum(any(score.dim() > 1 for score in layer) for layer in masked.layers()))


def score_rate(distance: float, momentum: float, steps: int) -> float:
    """The learning rate at its highest, if a score with a typical gradient of one sign is to travel a distance."""
    # A cosine has half its height on average, and momentum adds up to 1 / (1 - momentum) times the gradient.
    return distance * (1 - momentum) / (0.5 * steps)


def _fitted(views: ViewsConfig, model: nn.Module, size: int, display: Display) -> ViewsConfig:
    """The views at the backbone's size; small ones in the same proportion, as far as the backbone takes that."""
    assert views.small_size is not None
    small = math.ceil(size * views.small_size / views.size / 8) * 8
    if views.small and (taken := small_side(model, small, size)) != small:
        display.say(f"small views are {taken} instead of {small} pixels wide: the backbone does not accept that size")
        small = taken
    return dataclasses.replace(views, size=size, small_size=small)


@contextmanager
def _place(out: str | Path | None) -> Iterator[Path]:
    """The run folder, or one for as long as the run lasts."""
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


@contextmanager
def _told_where(out: str | Path | None) -> Iterator[None]:
    try:
        yield
    except InterruptedRunError as error:
        if out is not None:
            raise
        raise InterruptedRunError(
            "stopped; nothing was saved", todo="pass a run folder, out=..., to save runs"
        ) from error
