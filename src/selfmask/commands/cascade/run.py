"""Fitting a cascade: dispatcher, clusters, experts, combinations, report. What is finished is not done again.

dispatcher/            the dispatcher's run, or what was given for it
router.safetensors     the router, and which image belongs to which cluster
experts/K/             the run of each expert
cascade.smn            all of it, ready to use
report.html, result.json
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...cascade.clusters import Clusters
from ...cascade.combination import CONDITIONAL, UNCONDITIONAL, Combination, columns_of
from ...cascade.model import DISPATCHER, Cascade, expert_name
from ...data.images import MAX_PIXELS
from ...data.partition import LearnedSplit, open_to_learn
from ...data.seen import write_seen
from ...embedding.vectors import embed, embed_batches
from ...errors import ConfigError, ExpertError, MaskFileError, RunDamagedError, RunMismatchError
from ...evaluation.moments import Moments
from ...files import RunFile
from ...masking import MaskedModel
from ...preprocessing import Preprocessing, preprocessing_for
from ...running import best_device
from ...training import Processes, RunFolder, open_folder
from ...training.display import StagesDisplay
from ...training.start import Start
from .config import CascadeConfig
from .expert import run_adapt, train_expert
from .job import (
    ROUTER,
    Job,
    check_begun,
    check_enough,
    check_images,
    check_memory,
    check_readable,
    identity_of,
    least_images,
    opened,
)
from .workers import side_by_side

FILE = RunFile.CASCADE
_BATCH = 256  # images in a forward pass, where nothing is learned
_A_STEP = 8  # what training costs an image of a batch, in forward passes: two views, their gradients, a frozen view
_PICTURES = 5000  # what the report costs, in forward passes


def fit_cascade(
    model: nn.Module,
    images: Any,
    config: CascadeConfig | None = None,
    *,
    out: str | Path | None = None,
    dispatcher: str | Path | None = None,
    preprocessing: Preprocessing | None = None,
    about: Mapping[str, Any] | None = None,
    max_bad: float = 0.05,
    split: LearnedSplit = "train",
    max_pixels: int = MAX_PIXELS,
    workers: int = 1,
    display: StagesDisplay | None = None,
) -> Cascade:
    """Fit a cascade to `images` and return it in eval mode; stages that are finished in `out` are not repeated.

    model, images, preprocessing, about, max_bad, split, max_pixels: as in `adapt`.
    out: the folder of the cascade; if the call is interrupted, repeat it to continue to the same result.
    dispatcher: a run folder or mask file to use as the dispatcher, instead of adapting one.
    workers: number of experts to train at once, each in its own process.
    """
    display = display or StagesDisplay()
    if workers < 1:
        raise ConfigError("workers is out of range", expected="1 or more", found=workers)
    opened_images, note = open_to_learn(images, split=split, max_pixels=max_pixels)
    if note:
        display.say(note)
    with tempfile.TemporaryDirectory() if out is None else nullcontext(str(out)) as place:
        job = Job(
            model,
            opened_images,
            config or CascadeConfig(),
            Path(place),
            preprocessing,
            dict(about or {}),
            max_bad,
        )
        with opened(job, dispatcher) as folder, display.stages(*_plan(job)):
            begin(job, dispatcher, display)
            train_experts(job, workers, display)
            return finish(job, folder, display)


def prepare(job: Job, dispatcher: str | Path | None, display: StagesDisplay) -> None:
    """Only the first two stages: experts can then be trained anywhere, and `finish` collects them."""
    with opened(job, dispatcher), display.stages(*_plan(job)):
        begin(job, dispatcher, display)


def collect(job: Job, display: StagesDisplay) -> Cascade:
    """The last stages, once all experts are trained."""
    check_begun(job)
    with open_folder(job.folder, True, Processes()) as folder, display.stages(*_plan(job)):
        assert folder is not None
        return finish(job, folder, display)


# ---- stages -------------------------------------------------------------------------------------------------------


def begin(job: Job, given: str | Path | None, display: StagesDisplay) -> None:
    """The dispatcher, and the clusters that its features fall into."""
    if (job.folder / ROUTER).exists():
        return
    check_enough(job)
    with display.stage(_DISPATCHER):
        if given is None:
            if job.has_mask and not (job.dispatcher / RunFile.CONFIG).exists():
                raise RunMismatchError(
                    f"the cascade in {job.folder} was started with a given dispatcher",
                    todo="pass it again with --dispatcher, or choose another folder: --out",
                )
            # Also where it is finished: other settings than those it began with are refused.
            run_adapt(job, job.images, job.config.adapt, job.dispatcher, display)
        elif not job.has_mask:
            preprocessing = preprocessing_for(
                Preprocessing.of_model(job.model)[1], job.preprocessing, job.config.adapt.size
            )
            start = Start.of(given)
            write_seen(job.dispatcher / RunFile.SEEN, job.images, before=start.mask.parent / RunFile.SEEN)
            start.copy_to(job.dispatcher, job.model, preprocessing)
        elif (there := identity_of(job, Start.of(job.dispatcher))) != identity_of(job, Start.of(given)):
            raise RunMismatchError(
                f"the cascade in {job.folder} has another dispatcher",
                expected=there,
                found=given,
                todo="pass the one it was started with, or choose another folder: --out",
            )
    with display.stage(_CLUSTERS):
        masked = _dispatcher(job)
        assert masked.preprocessing is not None
        features, kept = embed(masked, job.images, masked.preprocessing, batch_size=_BATCH, progress=display.count)
        check_readable(job, len(kept))
        clusters = Clusters.fit(features, kept, job.config, job.config.seed)
        clusters.check(least_images(job.config))
        check_memory(job.config.experts, features.shape[1])
        check_images(job)
        clusters.save(job.folder / ROUTER)


def train_experts(job: Job, workers: int, display: StagesDisplay) -> None:
    """All experts that are still to be trained, one after the other or side by side."""
    if workers > 1:  # also for one that is left: with other threads than it began with, sums are rounded otherwise
        side_by_side(job, job.missing, min(workers, job.config.experts), display)
        return
    for index in job.missing:
        with display.stage(expert_name(index)):
            train_expert(job, index, display)


def finish(job: Job, folder: RunFolder, display: StagesDisplay) -> Cascade:
    """Both combinations, the file, and the report."""
    path = job.folder / FILE
    if not path.exists():
        with display.stage(_COMBINATIONS):
            combined = _combine(job, display)
            check_images(job)
            combined.save(path)
    try:
        cascade = Cascade.load(job.model, path, size=job.config.adapt.size).to(best_device())
    except MaskFileError as error:
        todo = "remove it and run the same command again (all experts are kept)"
        raise RunDamagedError(f"{path} cannot be used", found=error.what, todo=todo) from error
    if folder.result is None:
        from .outcome import write_outcome  # here, because matplotlib takes its time

        write_seen(folder.path / RunFile.SEEN, job.images, before=job.dispatcher / RunFile.SEEN)
        with display.stage(_REPORT):
            write_outcome(cascade, job.images, job.clusters(), folder, job.config, _results(job, folder), display.count)
    return cascade


_DISPATCHER, _CLUSTERS, _COMBINATIONS, _REPORT = "dispatcher", "clusters", "combinations", "report"


def _plan(job: Job) -> tuple[dict[str, float], list[str]]:
    """What every stage costs, in images that pass the backbone, and which are finished."""
    config, images = job.config, len(job.images)
    steps = config.adapt.number_of_steps(max(1, images // config.adapt.batch_size))
    training = float(steps * config.adapt.batch_size * _A_STEP)
    costs = {_DISPATCHER: training, _CLUSTERS: float(images)}
    costs |= {expert_name(k): training for k in range(config.experts)}
    costs |= {_COMBINATIONS: float(images * (config.experts + 1)), _REPORT: float(_PICTURES)}
    has = {
        _DISPATCHER: job.has_mask,
        _CLUSTERS: (job.folder / ROUTER).exists(),
        **{expert_name(k): job.has_expert(k) for k in range(config.experts)},
        _COMBINATIONS: (job.folder / FILE).exists(),
        _REPORT: (job.folder / RunFile.RESULT).exists(),
    }
    return costs, [name for name in costs if has[name]]


def _dispatcher(job: Job) -> MaskedModel:
    size = job.config.adapt.size
    masked = MaskedModel.from_pretrained(job.model, job.dispatcher / RunFile.MASK, name=DISPATCHER, size=size)
    return masked.eval().to(best_device())


def _combine(job: Job, display: StagesDisplay) -> Cascade:
    """Run all networks on all training images, and fit both combinations to what they say."""
    masked, router = _dispatcher(job), job.clusters().router.to(best_device())
    preprocessing, experts = masked.preprocessing, range(job.config.experts)
    assert preprocessing is not None
    for k in experts:
        _load_expert(masked, job, k)
    width = len(router.mean)
    unconditional, conditional = Moments(width * (len(experts) + 1)), Moments(width * (len(experts) + 1))
    every = _Every(masked, [DISPATCHER, *map(expert_name, experts)])
    done = 0
    for indices, rows, bad in embed_batches(every, job.images, preprocessing, batch_size=_BATCH):
        if indices:
            unconditional.add(rows)
            route = router(rows[:, :width].to(router.mean.device)).cpu()
            for k in sorted(set(route.tolist())):
                columns = columns_of([0, 1 + k], width)
                conditional.add(rows[route == k][:, columns], columns)
        done += len(indices) + len(bad)
        display.count(done, len(job.images))
    combinations = {CONDITIONAL: Combination.fit(conditional, width, job.config.scale)}
    del conditional  # a covariance of all features is large
    combinations[UNCONDITIONAL] = Combination.fit(unconditional, width, job.config.scale)
    settings = {name: getattr(job.config, name) for name in ("router", "components", "scale")}
    return Cascade(masked, router, combinations, preprocessing, settings)


class _Every(nn.Module):
    """The features of all masks, side by side."""

    def __init__(self, masked: MaskedModel, names: list[str]) -> None:
        super().__init__()
        self.masked, self.names = masked, names

    def forward(self, pixels: Tensor) -> Tensor:
        found = []
        for name in self.names:
            self.masked.set_mask(name)
            found.append(self.masked(pixels).float())
        return torch.cat(found, 1)


def _load_expert(masked: MaskedModel, job: Job, index: int) -> None:
    again = (
        f"train it: `selfmask cascade expert {job.folder} --index {index}`, or run the command that started the cascade"
    )
    file = job.expert(index) / RunFile.MASK
    if not job.has_expert(index) or not file.is_file():
        raise ExpertError(f"expert {index} is not trained yet", expected=file, found="no such file", todo=again)
    try:
        masked.load_mask(file, expert_name(index))
    except MaskFileError as error:
        raise ExpertError(
            f"the file of expert {index} cannot be used",
            expected=f"a mask for the dispatcher's base in {file}",
            found=error.what,
            todo=f"remove {job.expert(index)}, then {again}",
        ) from error


def _results(job: Job, folder: RunFolder) -> list[dict[str, Any]]:
    """What the runs of the dispatcher and of every expert came to; nothing is known of a mask that was given."""
    files = [job.dispatcher / RunFile.RESULT, *(job.expert(k) / RunFile.RESULT for k in range(job.config.experts))]
    return [folder.read_json(file) if file.exists() else {} for file in files]
