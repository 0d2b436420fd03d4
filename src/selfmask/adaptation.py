"""The main job: a frozen backbone and unlabelled images in, a mask out."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .data import Images, ImageStore
from .data.views import MultiCrop, ViewsConfig
from .embedding import fit, normalised
from .errors import ConfigError, InterruptedRunError
from .fitting import features_of, small_side
from .maskfile import Preprocessing
from .masking import MaskedModel, get_masked_model
from .objectives import Contrast, Objective, SwAV
from .outcome import Labelled, check_labels, finish
from .preparing import fingerprint, preprocessing_for, score_rate, store_of
from .presets import AdaptConfig
from .quality import Quality
from .starting import Start
from .training import Guard, ParameterGroup, Processes, Steps, open_folder, train
from .training.display import Display, QuietDisplay
from .training.seeds import derive, generator
from .training.trackers import Trackers

_HELD_OUT = 256  # images that the gate looks at, or a fifth of all if they are few


@dataclasses.dataclass(frozen=True)
class AdaptResult:
    """What came out: the masked model in eval mode, the numbers of `result.json`, and the log."""

    model: MaskedModel
    result: dict[str, Any]
    log: list[dict[str, Any]]
    folder: Path | None

    @property
    def helped(self) -> bool | None:
        """Whether the representation got better, as far as can be told without labels; None if it was not measured.

        If not, the mask is the one that the run began with: the identity, which is the frozen backbone, or `start`.
        """
        return None if "kept" not in self.result else self.result["kept"] == "mask"

    @property
    def quality(self) -> list[tuple[int, float]]:
        """The label-free quality over the run: pairs of step and quality. The start is `result["quality_before"]`."""
        return [(line["step"], line["quality"]) for line in self.log if "quality" in line]


def adapt(
    model: nn.Module,
    images: str | Path | Dataset[Any] | Images,
    config: AdaptConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    preprocessing: Preprocessing | None = None,
    about: Mapping[str, Any] | None = None,
    max_bad: float = 0.05,
    labelled: Labelled | None = None,
    start: Start | None = None,
    report: bool = True,
    display: Display | None = None,
    watch: Callable[[MaskedModel, Mapping[str, Any]], None] | None = None,
) -> AdaptResult:
    """Learn, without labels, which weights of `model` to switch off for `images`.

    >>> result = selfmask.adapt(timm.create_model("resnet18", pretrained=True, num_classes=0), "photos/")
    >>> result.model(batch)                 # the adapted backbone
    >>> result.model.save_pretrained("photos.smn")

    model: any module that maps images to one vector each; it is frozen.
    images: a folder, a list file, an array file, the name of a data set, or a Dataset.
    out: the run folder (log, checkpoints, mask.smn, result.json); with `resume`, a run in it is continued exactly.
    preprocessing: what the model was trained with; timm models carry theirs, others are taken for ImageNet's.
    about: what the run folder should say of the backbone: its name, its weights.
    max_bad: share of images that may fail to decode.
    labelled: images to measure with at the end, before and after.
    start: where to begin, if not with all weights on; the gate then falls back to that.
    report: whether to write report.html.
    watch: called with the model and each line of the log, to look at more than that.
    """
    config = config or AdaptConfig.preset("fast")
    config.loop(1)  # what cannot work is said before the work
    check_labels(labelled)
    processes, display, began = Processes(), display or QuietDisplay(), time.perf_counter()
    masked = get_masked_model(model, config.mask) if start is None else start.begin(model)
    config = dataclasses.replace(config, mask=masked.config)  # a start brings its own
    if config.gate and start is None and masked.sparsity()["total"] < 1:
        raise ConfigError(
            "the gate needs a mask that begins with all weights on: that is what it falls back to",
            found=f"{masked.sparsity()['total']:.1%} of the weights on",
            todo="choose the threshold rule, or gate=False",
        )
    masked.preprocessing = how = preprocessing_for(masked.preprocessing, preprocessing, config.size)
    masked.base_name = (about or {}).get("backbone", masked.base_name)
    masked.to(processes.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    features = features_of(masked, how.size[0])
    views = _views(masked, config.views, how, display)
    result: dict[str, Any] = {}
    log: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() if out is None else nullcontext(str(out)) as place,
        open_folder(Path(place), resume, processes) as folder,
        Trackers(config.track, Path(place) if folder else None) as trackers,
    ):
        store = store_of(images, how, max_bad, display, folder)
        held, trained = held_out(len(store), config)
        batches = Steps(
            store, views, batch_size=config.batch_size, seed=config.seed, processes=processes, among=trained
        )
        steps = config.number_of_steps(batches.per_epoch)
        deciding = {
            **{"backbone": masked.base_name, "weights": None, "size": how.size[0], **(about or {})},
            **{"base": masked.pack().fingerprint[:16], "data": fingerprint(store), "steps": steps},
            **{"processes": processes.count, "adapt": config.to_dict()},
            **({} if start is None else {"start": masked.pack().sha256[:16]}),
        }
        processes.from_main(lambda: folder.begin(deciding) if folder else None)
        needed = config.mask.norm == "anchored" or config.objective == "contrast"
        reference = _reference(batches, config, processes) if needed else []
        if config.mask.norm == "anchored":
            masked.anchor(reference)
        objective = _objective(masked, features, reference, config).to(processes.device)
        if start is not None and not start.heads(objective):
            display.say("the heads begin anew: none are known that fit")
        rate = config.score_lr
        if config.per_tensor:
            rate = score_rate(masked, config.score_lr, config.momentum, steps)
        groups = [
            ParameterGroup(
                list(masked.scores.parameters()),
                rate,
                per_tensor=config.per_tensor,
                start=config.heads_first,
            ),
            ParameterGroup(list(objective.parameters()), config.head_lr, config.head_weight_decay),
        ]
        guard = _guard(masked, store, held, how, reference, config, processes) if config.gate else None
        before = time.perf_counter()
        try:
            with display.training(steps):
                reports = [display.line, trackers.line]
                if watch is not None:
                    reports.append(partial(watch, masked))
                train(masked, objective, groups, batches, config.loop(steps), folder, processes, reports, guard)
        except InterruptedRunError as error:
            if out is not None:
                raise
            raise InterruptedRunError("stopped, and nothing is kept", todo="give a run folder: out=") from error
        if config.mask.norm == "anchored" and guard is None:  # with one, the best point has its statistics
            masked.recalibrate(reference)
        outside = began + time.perf_counter() - before
        masked.eval()
        if folder is not None:
            result = folder.result or {}
            if not result or not (folder.path / "mask.smn").exists():
                if with_report := report and out is not None:
                    display.say("measuring, and writing the report")
                numbers = {"steps": steps, "seed": config.seed, "images": len(store) - len(store.bad)}
                if guard is not None:
                    numbers |= _verdict(guard, "identity" if start is None else "start")
                result = finish(masked, how, store, folder, numbers, labelled, outside, with_report=with_report)
            log = folder.read_log()
    return AdaptResult(masked, result, log, None if out is None else Path(out))


def held_out(count: int, config: AdaptConfig) -> tuple[list[int], list[int]]:
    """Numbers of the images that the gate looks at, and of those that are trained on."""
    held = max(2, min(_HELD_OUT, count // 5)) if config.gate else 0
    order = torch.randperm(count, generator=generator(config.seed, "held out")).tolist()
    return sorted(order[:held]), sorted(order[held:])


def _reference(batches: Steps, config: AdaptConfig, processes: Processes) -> list[Tensor]:
    """One batch of views, as many as a step has, that stands for what is trained on; the same in all processes."""
    count = min(2 * config.batch_size, len(batches.among))
    place = torch.randperm(len(batches.among), generator=generator(config.seed, "reference"))[:count]
    images = batches.store.batch(batches.among[place].tolist())
    views = batches.views(images, batches.views.draw(count, generator(config.seed, "reference views")))
    return [views[0].to(processes.device, memory_format=torch.channels_last)]


def _objective(masked: MaskedModel, features: int, reference: list[Tensor], config: AdaptConfig) -> Objective:
    large = config.views.large
    if config.objective == "swav":
        return SwAV(features, config.swav, large_crops=large, seed=derive(config.seed, "heads"))
    centre = torch.cat([masked.frozen(batch) for batch in reference]).mean(0)
    return Contrast(centre, config.contrast, frozen=masked.frozen, large_crops=large)


def _guard(
    masked: MaskedModel,
    store: ImageStore,
    held: list[int],
    how: Preprocessing,
    reference: list[Tensor],
    config: AdaptConfig,
    processes: Processes,
) -> Guard:
    images = store.batch(held)
    one = dataclasses.replace(config.views, size=how.size[0], large=1, small=0)
    distorted = MultiCrop(one, how)
    (views,) = distorted(images, distorted.draw(len(images), generator(config.seed, "held-out views")))
    clean = torch.stack([normalised(fit(image, how), how) for image in images])
    clean, views = (part.to(processes.device, memory_format=torch.channels_last) for part in (clean, views))
    quality = Quality(masked, clean, views)

    def measure() -> float:
        if config.mask.norm == "anchored":
            masked.recalibrate(reference)
        return processes.from_main(quality)

    return Guard(measure, config.quality_every)


def _verdict(guard: Guard, start: str) -> dict[str, Any]:
    """What the gate decided, for the result."""
    return {
        **{"quality_before": guard.first_quality, "quality_after": guard.best_quality},
        **{"best_step": guard.best_step, "kept": "mask" if guard.best_step else start},
        "gate_seconds": guard.seconds,
    }


def _views(masked: MaskedModel, views: ViewsConfig, how: Preprocessing, display: Display) -> MultiCrop:
    """The views at the backbone's size; small ones in the same proportion, as far as the backbone takes that."""
    assert views.small_size is not None
    size = how.size[0]
    small = math.ceil(size * views.small_size / views.size / 8) * 8
    if views.small and (taken := small_side(masked, small, size)) != small:
        display.say(f"small views have {taken} instead of {small} pixels a side: the backbone takes no others")
        small = taken
    return MultiCrop(dataclasses.replace(views, size=size, small_size=small), how)
