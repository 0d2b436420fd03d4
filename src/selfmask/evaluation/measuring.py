"""A mask beside its frozen backbone, on labelled images, by every protocol that is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..data.splits import label_split, unseen
from .feature_map import MAX_WIDTH, FeatureMap
from .inputs import OnProgress
from .metrics import Scores, interval, score
from .protocols import HEAD, PROTOCOLS, Classifier, Prediction, Settings, Task, check_head, measures

MAP = "+map"
"""Ends the name of a variant whose vectors went through a map."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one protocol says of one model: means over seeds, and half the width of their 95 % intervals.

    The widths are None where there was one seed only. `each` is top-1 of every seed; `per_class` is the mean over
    seeds; `confusion` counts the images of all seeds; `chosen` is what the protocol chose for each seed.
    """

    top1: float
    top1_interval: float | None
    top5: float
    top5_interval: float | None
    each: list[float]
    per_class: dict[str, float]
    confusion: list[list[int]]
    chosen: list[dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """All numbers of an evaluation. `results` are by key (`protocols.measures`), then by variant: "frozen", and "mask"
    if there is one, and the same with a map: "frozen+map".

    labelled_images: how many training images had a label, the same for every seed. unseen: how many classes had none,
    for each seed. left_out: images that could not be read. seeds: how many there were: with all labels nothing is
    random, and there is one.
    """

    name: str
    classes: list[str]
    train_images: int
    test_images: int
    labelled_images: int
    unseen: list[int]
    left_out: int
    divided: bool
    settings: Settings
    seeds: int
    results: dict[str, dict[str, Measured]]
    titles: Mapping[str, str]
    """What to call each variant."""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Features:
    """The features of each variant, and the class numbers of their rows."""

    train: dict[str, Tensor]
    labels: Tensor
    test: dict[str, Tensor]
    truth: Tensor
    classes: list[str]
    left_out: int
    divided: bool
    titles: Mapping[str, str]
    """What to call each variant."""
    head: Classifier | None = None
    """What was trained to tell classes by the features of the last variant."""
    maps: Mapping[str, FeatureMap] = dataclasses.field(default_factory=dict)
    """Those that features went through, by the variant that they are of."""


def with_maps(
    features: Features,
    *,
    power: float | None = None,
    given: Mapping[str, FeatureMap] | None = None,
    without: Sequence[str] = (),
) -> Features:
    """Each variant followed by itself with a map, fitted to the training features: a map needs no labels.

    power: of whitening; by default each map's own. given: maps of variants that have one. without: variants that get
    none, besides those too wide for one. No image is embedded again.
    """
    train, test, titles = dict[str, Tensor](), dict[str, Tensor](), dict[str, str]()
    maps = dict[str, FeatureMap]()
    for variant, rows in features.train.items():
        train[variant], test[variant], titles[variant] = rows, features.test[variant], features.titles[variant]
        if variant in without or rows.shape[1] > MAX_WIDTH or len(rows) < 2:
            continue
        whiten = (given or {}).get(variant) or FeatureMap.fit(rows)
        maps[variant] = whiten = whiten if power is None else whiten.at(power)
        key = variant + MAP
        train[key], test[key] = whiten(rows), whiten(features.test[variant])
        titles[key] = f"{features.titles[variant]} + map"
    return dataclasses.replace(features, train=train, test=test, titles=titles, maps=maps)


def evaluate(
    name: str,
    features: Features,
    protocols: Sequence[str],
    settings: Settings,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Run every protocol on the features of every variant. `progress` counts the test images of all these runs."""
    splits = label_splits(features, settings)
    if HEAD in protocols:
        check_head(features.head, features.classes)  # before the work
    # A head knows the features that it was trained on: those of the last variant, without a map.
    own = [variant for variant in features.train if not variant.endswith(MAP)][-1:]
    wanted = measures(protocols, settings)
    jobs = [(key, variant) for key in wanted for variant in (own if key == HEAD else features.train)]
    results: dict[str, dict[str, Measured]] = {key: {} for key in wanted}
    images = len(features.truth)

    def on_progress(runs: float) -> None:
        if progress is not None:
            progress(int(runs * images), len(jobs) * len(splits) * images)

    for number, (key, variant) in enumerate(jobs):
        protocol, how = wanted[key]
        results[key][variant] = _measure(
            protocol, variant, features, splits, how, _shifted(on_progress, number * len(splits))
        )
    return Evaluation(
        name=name,
        classes=features.classes,
        train_images=len(features.labels),
        test_images=images,
        labelled_images=len(splits[0]),
        unseen=[len(unseen(features.labels.tolist(), split)) for split in splits],
        left_out=features.left_out,
        divided=features.divided,
        settings=settings,
        seeds=len(splits),
        results=results,
        titles=dict(features.titles),
    )


def label_splits(features: Features, settings: Settings) -> list[list[int]]:
    """For each seed, which training images keep their labels. All labels can only be chosen in one way."""
    labels = features.labels.tolist()
    if settings.label_fraction == 1:
        return [list(range(len(labels)))]
    return [
        label_split(labels, settings.label_fraction, seed, stratified=settings.stratified)
        for seed in range(settings.seeds)
    ]


def _shifted(on_progress: OnProgress, before: int) -> OnProgress:
    return lambda share: on_progress(before + share)


def _measure(
    protocol: str,
    variant: str,
    features: Features,
    splits: Sequence[Sequence[int]],
    settings: Settings,
    on_progress: OnProgress,
) -> Measured:
    scores, predictions = list[Scores](), list[Prediction]()
    own, test = features.train[variant], features.test[variant]
    for seed, chosen in enumerate(splits):
        train = own if len(chosen) == len(own) else own[chosen]
        task = Task(train, features.labels[chosen], test, settings, seed, features.classes, features.head)
        predictions.append(PROTOCOLS[protocol](task, _shifted(on_progress, seed)))
        scores.append(score(predictions[-1].ranked, features.truth, features.classes))
        on_progress(seed + 1)
    top1, top1_interval = interval([each.top1 for each in scores])
    top5, top5_interval = interval([each.top5 for each in scores])
    return Measured(
        top1,
        top1_interval,
        top5,
        top5_interval,
        each=[each.top1 for each in scores],
        per_class={name: float(np.mean([each.per_class[name] for each in scores])) for name in scores[0].per_class},
        confusion=np.sum([each.confusion for each in scores], axis=0).tolist(),
        chosen=[prediction.chosen for prediction in predictions],
    )
