"""Learning from labels: the loop of an adaptation, with another objective."""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Images, SomeImages, label_split
from ..data.views import MultiCrop
from ..embedding import embed
from ..errors import ConfigError, HeadError, InterruptedRunError, LabelsError
from ..evaluation import linear_probe_fit
from ..evaluation.labels import check_left
from ..evaluation.metrics import score
from ..fitting import features_of
from ..heads import Head, LinearHead, MaskedHead, TextHead, head_of
from ..maskfile import Preprocessing
from ..masking import MaskedModel
from ..objectives.supervised import Supervised
from ..preparing import fingerprint, preprocessing_for, score_rate, store_of
from ..training import ParameterGroup, Processes, RunFolder, Steps, open_folder
from ..training import train as loop
from ..training.display import Display, QuietDisplay
from ..training.seeds import derive
from ..training.trackers import Trackers
from .config import TrainConfig
from .methods import Method, prepare
from .tuned import About, about_run, write_tuned

_REFERENCE = 2  # batches
MASK, TUNED = "mask.smn", "tuned.safetensors"


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What came out: the trained model and its head in eval mode, the numbers of `result.json`, and the log."""

    model: nn.Module
    head: Head
    result: dict[str, Any]
    log: list[dict[str, Any]]
    folder: Path | None


def train(
    model: nn.Module,
    images: Images,
    config: TrainConfig | None = None,
    *,
    test: Images | None = None,
    head: Head | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    preprocessing: Preprocessing | None = None,
    about: Mapping[str, Any] | None = None,
    max_bad: float = 0.05,
    display: Display | None = None,
) -> TrainResult:
    """Train a mask, or what another method trains, from the labels of `images`; measure on `test`, if given.

    >>> train_images, test_images = open_labelled("birds/")
    >>> result = selfmask.train(backbone, train_images, TrainConfig.preset("fast"), test=test_images)
    >>> result.head(result.model(batch))    # one number a class

    model: any module that maps images to one vector each. A mask leaves it as it is; other methods change it.
    test: images with the same classes, to measure with before and after; they are never trained on.
    head: a head to train with in place of the config's, such as the `TextHead` of CLIP.
    The rest is as in `adapt`.
    """
    config = config or TrainConfig.preset("fast")
    config.loop(1)  # what cannot work is said before the work
    classes = _classes(images, test)
    if head is not None and head.classes != classes:
        raise HeadError("the head is made for other classes", expected=classes, found=head.classes)
    _check_head(config, head)
    chosen = chosen_images(images, config, classes)
    processes, display, start = Processes(), display or QuietDisplay(), time.perf_counter()
    own_name, own_how = Preprocessing.of_model(model)
    how = preprocessing_for(own_how, preprocessing, config.size)
    name = (about or {}).get("backbone", own_name)
    model.to(processes.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    with (
        tempfile.TemporaryDirectory() if out is None else nullcontext(str(out)) as place,
        open_folder(Path(place), resume, processes) as folder,
        Trackers(config.track, Path(place) if folder else None) as trackers,
    ):
        features = features_of(model, how.size[0])
        store = store_of(chosen, how, max_bad, display, folder)
        written = about_run(config, model, name, how)
        deciding = {
            **{"backbone": name, "weights": None, "size": how.size[0], **(about or {})},
            **{"base": written.fingerprint[:16], "data": fingerprint(store), "processes": processes.count},
            **{"labels": len(store), "classes": classes, "train": config.to_dict()},
        }
        processes.from_main(lambda: folder.begin(deciding) if folder else None)
        frozen = _Frozen(model, how, chosen, test, classes, head)
        if head is None:
            # One for all processes: their solvers may end a bit apart.
            head = processes.from_main(lambda: _head(config, features, classes, frozen))
        base_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
        method = prepare(model, config)
        if isinstance(method.model, MaskedModel):
            method.model.preprocessing, method.model.base_name = how, name
        objective = Supervised(head).to(processes.device)
        method.model.to(processes.device)
        views = MultiCrop(dataclasses.replace(config.views, size=how.size[0], small_size=None), how)
        batches = Steps(
            *(store, views),
            batch_size=_batch_size(config, len(store), processes),
            seed=config.seed,
            processes=processes,
            with_labels=True,
        )
        steps = config.number_of_steps(batches.per_epoch)
        groups = _groups(method, head, config, steps)
        reference = _reference(batches, processes)
        if config.mask.norm == "anchored" and isinstance(method.model, MaskedModel):
            method.model.anchor(reference)
        before = time.perf_counter()
        try:
            with display.training(steps):
                reports = [display.line, trackers.line]
                loop(method.model, objective, groups, batches, config.loop(steps), folder, processes, reports)
        except InterruptedRunError as error:
            if out is not None:
                raise
            raise InterruptedRunError("stopped, and nothing is kept", todo="give a run folder: out=") from error
        if config.mask.norm in ("anchored", "recalibrate") and isinstance(method.model, MaskedModel):
            method.model.recalibrate(reference)
        outside = start + time.perf_counter() - before
        method.model.eval()
        result, log = {}, list[dict[str, Any]]()
        if folder is not None:
            if (result := folder.result or {}) == {}:
                numbers: dict[str, Any] = {"method": config.method, "head": _kind(head), "steps": steps}
                numbers |= {
                    "seed": config.seed,
                    "base_bytes": base_bytes,
                    "labels": len(frozen.labels),
                    "classes": len(classes),
                    **frozen.numbers,
                }
                display.say("measuring, and writing the report")
                result = _finish(method, head, how, folder, written, test, numbers, outside)
                if out is not None:
                    _write_report(method, folder, result, store.bad)
                folder.write_json("result.json", result)
            log = folder.read_log()
        return TrainResult(method.model, head.eval(), result, log, None if out is None else Path(out))


def _classes(images: Images, test: Images | None) -> list[str]:
    """The names of the classes, which the labels of both sets number."""
    if images.labels is None or (test is not None and test.labels is None):
        raise LabelsError(
            "these images have no labels",
            expected="a folder with a sub-folder for each class, a list with labels, or a labelled data set",
            todo="without labels, use `selfmask adapt`",
        )
    if len(set(images.labels)) < 2:
        raise LabelsError("there is only one class to learn", expected="two or more", found=images.classes)
    if test is not None and test.classes != images.classes:
        raise LabelsError(
            "training and test images number their classes differently",
            expected=images.classes,
            found=test.classes,
            todo="open both together: open_labelled",
        )
    return images.classes or [str(number) for number in range(max(images.labels) + 1)]


def chosen_images(images: Images, config: TrainConfig, classes: Sequence[str]) -> Images:
    """The images whose labels may be learned from."""
    how = {"stratified": config.stratified, "classes": classes}
    return SomeImages(images, label_split(images.labels or [], config.label_fraction, config.seed, **how))  # type: ignore[arg-type]


def _kind(head: Head) -> str:
    return "clip-text" if isinstance(head, TextHead) else "masked" if isinstance(head, MaskedHead) else "linear"


def _check_head(config: TrainConfig, head: Head | None) -> None:
    if (config.head == "clip-text") != isinstance(head, TextHead):
        raise ConfigError(
            "the head is not the one that the settings ask for",
            expected=config.head,
            found="none" if head is None else type(head).__name__,
            todo="give head=TextHead(...) together with head='clip-text' in the settings",
        )


def _batch_size(config: TrainConfig, images: int, processes: Processes) -> int:
    """That of the settings, or less where there are few labels; processes and parts share it out evenly."""
    parts = processes.count * config.accumulate
    return config.batch_size if images >= config.batch_size else max(parts, images // parts * parts)


class _Frozen:
    """The frozen backbone on the images of the run: its vectors, and how good it is before any training."""

    def __init__(
        self,
        model: nn.Module,
        how: Preprocessing,
        chosen: Images,
        test: Images | None,
        classes: Sequence[str],
        head: Head | None,
    ) -> None:
        self.numbers: dict[str, float] = {}
        vectors, self.labels = _vectors(model, chosen, how)
        tested = [] if test is None else test.labels or []
        check_left(set(self.labels.tolist()), set(tested), classes)
        # From the same labels: a probe of the frozen backbone, or what a head knows without any training.
        self.probe = None if head is not None else linear_probe_fit(vectors, self.labels)
        if test is not None:
            queries, truth = _vectors(model, test, how)
            if self.probe is not None:
                ranked = self.probe.rank(queries)
            else:
                assert head is not None
                ranked = head.ranked(queries)
            self.numbers = {"accuracy_before": float((ranked[:, 0].cpu() == truth).double().mean())}


def _vectors(model: nn.Module, images: Images, how: Preprocessing) -> tuple[Tensor, Tensor]:
    vectors, kept = embed(model, images, how)
    assert images.labels is not None
    return vectors, torch.tensor(images.labels)[kept]


def _head(config: TrainConfig, features: int, classes: list[str], frozen: _Frozen) -> Head:
    seed = derive(config.seed, "head")
    if config.head == "masked":
        return MaskedHead(features, classes, mask=config.mask, seed=seed)
    head = LinearHead(features, classes, normalised=config.head_start == "probe", seed=seed)
    if config.head_start == "probe" and frozen.probe is not None:
        weight, bias = torch.zeros(len(classes), features), torch.full((len(classes),), -10.0)
        numbers = frozen.probe.classes.cpu()
        weight[numbers], bias[numbers] = frozen.probe.weight.cpu(), frozen.probe.bias.cpu()
        head.start_from(weight, bias)
    return head


def _groups(method: Method, head: Head, config: TrainConfig, steps: int) -> list[ParameterGroup]:
    groups = []
    for part in (method.model, head.masked if isinstance(head, MaskedHead) else None):
        if isinstance(part, MaskedModel):
            rate = score_rate(part, config.rate, config.momentum, steps) if config.per_tensor else config.rate
            groups.append(ParameterGroup(list(part.scores.parameters()), rate, per_tensor=config.per_tensor))
    if method.parameters and not isinstance(method.model, MaskedModel):
        groups.append(ParameterGroup(method.parameters, config.rate, config.weight_decay))
    if not isinstance(head, MaskedHead) and (own := list(head.parameters())):
        rate = config.rate if config.method == "linear" else config.head_lr
        groups.append(ParameterGroup(own, rate, config.weight_decay))
    return groups


def _reference(batches: Steps, processes: Processes) -> list[Tensor]:
    """Views that stand for what is trained on: those of the first steps, the same in all processes."""
    alone = copy.copy(batches)
    alone.part = slice(None)
    return [alone[step][0][0].to(processes.device) for step in range(min(_REFERENCE, batches.per_epoch))]


def _finish(
    method: Method,
    head: Head,
    how: Preprocessing,
    folder: RunFolder,
    written: About,
    test: Images | None,
    numbers: dict[str, Any],
    outside: float,
) -> dict[str, Any]:
    """Write the file, and measure what it is worth."""
    log = folder.read_log()
    result: dict[str, Any] = {**numbers, "loss": log[-1]["loss"]}
    if isinstance(method.model, MaskedModel):
        result["bytes"] = method.model.save_pretrained(folder.path / MASK, head=head.tensors())
        result["active"] = method.model.sparsity()["total"]
    else:
        about = dataclasses.replace(written, targets=method.targets)
        result["bytes"] = write_tuned(folder.path / TUNED, method, head, about)
    if test is not None:
        vectors, truth = _vectors(method.model, test, how)
        kept = head_of(head.tensors())  # what the file gives back
        scores = score(kept.ranked(vectors), truth, head.classes)
        result |= {"accuracy": scores.top1, "top5": scores.top5, "test_images": len(truth)}
        folder.write_json("scores.json", {"classes": head.classes, **dataclasses.asdict(scores)})
    result["seconds"] = sum(line["seconds"] for line in log) + time.perf_counter() - outside
    return result


def _write_report(method: Method, folder: RunFolder, result: dict[str, Any], bad: Sequence[tuple[str, str]]) -> None:
    from ..report import ReportData, write_report  # here, because matplotlib takes its time

    config = json.loads((folder.path / "config.json").read_text())
    shares: dict[str, float] = {}
    if isinstance(method.model, MaskedModel):
        shares = method.model.sparsity()
        shares.pop("total")
    title = (
        f"{config.get('backbone') or 'A backbone'}, {result['method']}, trained on {config.get('images') or 'images'}"
    )
    shown = {**result, "accuracy_after": result.get("accuracy")}
    if shares:
        shown["mask_bytes"] = result["bytes"]
    scores = folder.path / "scores.json"
    found = json.loads(scores.read_text()) if scores.exists() else {"confusion": (), "classes": ()}
    data = ReportData(title, config, shown, folder.read_log(), shares, None, bad, found["confusion"], found["classes"])
    write_report(folder.path / "report.html", data)
