"""The main job: a frozen backbone and unlabelled images in, a mask out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .data import Images, ImageStore, open_images
from .data.views import MultiCrop
from .errors import ConfigError, NotABackboneError, TooFewImagesError
from .maskfile import Preprocessing
from .masking import MaskedModel, get_masked_model
from .objectives import SwAV
from .outcome import Labelled, finish
from .presets import AdaptConfig
from .training import ParameterGroup, Processes, RunFolder, Steps, train
from .training.display import Display, QuietDisplay
from .training.seeds import derive
from .training.trackers import Trackers

IMAGENET = Preprocessing((224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear")
_CACHE_SIDE = 2  # cached images keep twice the pixels of a large crop a side: small crops stay sharp


@dataclasses.dataclass(frozen=True)
class AdaptResult:
    """What came out: the masked model in eval mode, the numbers of `result.json`, and the log."""

    model: MaskedModel
    result: dict[str, Any]
    log: list[dict[str, Any]]
    folder: Path | None


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
    display: Display | None = None,
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
    """
    config = config or AdaptConfig.preset("reference")
    processes, display, start = Processes(), display or QuietDisplay(), time.perf_counter()
    masked = get_masked_model(model, config.mask)
    masked.preprocessing = how = _preprocessing(masked, preprocessing, config.size)
    store = _store(images, how, max_bad, display)
    batches = _batches(store, how, config, processes)
    steps = config.number_of_steps(batches.per_epoch)
    described = {
        **{"backbone": masked.base_name, "weights": None, "images": None, "size": how.size[0], **(about or {})},
        **{"steps": steps, "data": fingerprint(store), "adapt": config.to_dict()},
    }
    masked.base_name = described["backbone"]
    masked.to(processes.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    objective = SwAV(
        features_of(masked, how), config.swav, large_crops=config.views.large, seed=derive(config.seed, "heads")
    ).to(processes.device)
    groups = [
        ParameterGroup(list(masked.scores.parameters()), config.score_lr),
        ParameterGroup(list(objective.parameters()), config.head_lr, config.head_weight_decay),
    ]
    result: dict[str, Any] = {}
    log: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() if out is None else nullcontext(str(out)) as place,
        open_folder(Path(place), described, resume, processes) as folder,
    ):
        trackers = Trackers(config.track, Path(place) if processes.is_main else None, described)
        with display.training(steps), trackers:
            reports = [display.line, trackers.line]
            train(masked, objective, groups, batches, config.loop(steps), folder, processes, reports)
        masked.eval()
        if folder is not None:
            display.say("measuring, and writing the report")
            numbers = {"steps": steps, "seed": config.seed, "seconds": time.perf_counter() - start}
            result, log = finish(masked, how, store, folder, numbers, labelled), folder.read_log()
    return AdaptResult(masked, result, log, None if out is None else Path(out))


def _preprocessing(masked: MaskedModel, given: Preprocessing | None, size: int | None) -> Preprocessing:
    how = given or masked.preprocessing or IMAGENET
    return how if size is None else dataclasses.replace(how, size=(size, size))


def _store(images: Any, how: Preprocessing, max_bad: float, display: Display) -> ImageStore:
    opened = open_images(images)
    with display.decoding(len(opened)) as progress:
        store = ImageStore(opened, side=_CACHE_SIDE * max(how.size), max_bad=max_bad, progress=progress)
    if len(store) < 2 or _all_alike(store):
        raise TooFewImagesError(
            "there is nothing to tell apart in these images",
            expected="many different images",
            found=f"{len(store)} image(s)" + (", all alike" if len(store) > 1 else ""),
            todo="check the folder; a few hundred images are a good start",
        )
    return store


def _all_alike(store: ImageStore) -> bool:
    first = store[0]
    return all(torch.equal(first, store[i]) for i in range(1, len(store)))


def _batches(store: ImageStore, how: Preprocessing, config: AdaptConfig, processes: Processes) -> Steps:
    if how.size[0] != how.size[1]:
        raise ConfigError("views are square", expected="one size", found=how.size, todo="give a size: --size")
    views = MultiCrop(dataclasses.replace(config.views, size=how.size[0], small_size=None), how)
    return Steps(store, views, batch_size=config.batch_size, seed=config.seed, processes=processes)


def features_of(model: nn.Module, how: Preprocessing) -> int:
    """The width of the model's vectors, found by trying."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            vectors = model(torch.zeros(1, 3, *how.size, device=device))
    finally:
        model.train(was_training)
    if not isinstance(vectors, Tensor) or vectors.ndim != 2:
        raise NotABackboneError(
            "the model does not map an image to one vector",
            expected="an output of [images, features]",
            found=list(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__,
            todo="pool its output first; timm models do with num_classes=0",
        )
    return vectors.shape[1]


def fingerprint(store: ImageStore) -> str:
    """Tells two sets of images apart, by names and by some of their pixels."""
    digest = hashlib.sha256(json.dumps([store.names, store.side]).encode())
    for index in range(0, len(store), max(1, len(store) // 16)):
        digest.update(store[index].contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


@contextmanager
def open_folder(
    path: Path, config: Mapping[str, Any], resume: bool, processes: Processes
) -> Iterator[RunFolder | None]:
    """The run folder in the main process, None in the others; an error there is an error in all."""
    folder, error = None, None
    if processes.is_main:
        try:
            folder = RunFolder(path, config, resume=resume)
        except Exception as problem:
            error = problem
    if (shared := processes.share(error)) is not None:
        raise shared
    with folder or nullcontext():
        yield folder
