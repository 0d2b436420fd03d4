"""The appendix's pictures of a cascade: embeddings on a plane, and how even the classes of its clusters are."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from ..cascade.clusters import Clusters as Members
from ..cascade.combination import CONDITIONAL
from ..cascade.model import DISPATCHER
from ..commands.opening import load_embedder
from ..data import SomeImages
from ..embedding.embedder import FROZEN
from ..embedding.extraction import extract
from ..errors import LabelsError
from ..evaluation.tsne import LEAST, plane_of
from ..files import RunFile, write_atomically
from .cascade import cascade_of
from .drawing import curves, planes
from .readings import steps_of
from .scale import Case, Scale
from .study import Claim, Curve, Entry, Result, Study, register
from .tasks import Cascade, Task, World, leave

DATA = ("cifar100",)
VARIANTS = {FROZEN: "frozen", DISPATCHER: "SMN", CONDITIONAL: "conditional cascade"}
_POINTS = "points.npz"
_SHOWN_CLASSES, _MOST_POINTS, _NEIGHBOURS = 20, 2000, 10
_FIFTH = 20.0  # per cent of the classes: 20 of the paper's hundred
# Clusters have no order. The paper's, by the share of their images that the most common fifth of the classes has,
# from the least on: ours get these numbers in the same order.
_PAPER_ORDER = (1, 5, 3, 4, 2)


@dataclasses.dataclass(frozen=True)
class Pictures(Task):
    """t-SNE of test images in three embeddings, and the classes of the training images in each cluster."""

    verb = "draw"
    of: Cascade

    @property
    def needs(self) -> tuple[Task, ...]:
        return (self.of,)

    @property
    def title(self) -> str:
        return f"pictures of {self.of.title}"

    def settings(self) -> Mapping[str, Any]:
        return {"classes": _SHOWN_CLASSES, "points": _MOST_POINTS, "neighbours": _NEIGHBOURS}

    def run(self, place: Path, world: World) -> None:
        train, test = world.labelled(self.subject)
        members = Members.load(world.place(self.of) / RunFile.ROUTER, self.of.config)
        if train.labels is None or test.labels is None:
            raise LabelsError("the images have no labels to tell clusters by", found=self.subject.data)
        labels = torch.tensor(train.labels)
        count = len(set(train.labels))
        shares = [cumulative(labels[members.members(k)], count) for k in range(self.of.config.experts)]
        first = sorted(set(test.labels))[:_SHOWN_CLASSES]
        numbers = [i for i, label in enumerate(test.labels) if label in first]
        shown = SomeImages(test, numbers[:: -(-len(numbers) // _MOST_POINTS)])
        embedder = load_embedder(
            world.place(self.of), backbone=self.subject.backbone, weights=world.weights(self.subject)
        )
        found = extract(embedder, shown, cache=world.features)
        kept = np.array([(shown.labels or [])[i] for i in found[FROZEN].kept])
        if len(kept) < LEAST:
            raise LabelsError("there are too few test images to draw", expected=f"{LEAST} or more", found=len(kept))
        points = {name: plane_of(found[name].rows, self.of.config.seed) for name in VARIANTS}
        with io.BytesIO() as file:
            np.savez(file, labels=kept, **points)  # type: ignore[arg-type]  # which has one more argument
            write_atomically(place / _POINTS, file.getvalue())
        alike = {name: neighbours_alike(each, kept) for name, each in points.items()}
        leave(place, {"classes": count, "clusters": in_paper_order(shares), "neighbours_alike": alike})


def cumulative(labels: Tensor, classes: int) -> list[float]:
    """The share of images that the most common class has, the two most common ones, and so on to all."""
    counts = labels.bincount(minlength=classes).sort(descending=True).values[:classes]
    shares: list[float] = (counts.cumsum(0) / max(len(labels), 1)).tolist()
    return shares


def in_paper_order(shares: Sequence[Sequence[float]]) -> dict[str, Sequence[float]]:
    """Clusters by number; the least even one has that of the paper's, and so on."""
    at = [each[max(0, round(_FIFTH / 100 * len(each)) - 1)] for each in shares]
    order = sorted(range(len(shares)), key=at.__getitem__)
    numbers = _PAPER_ORDER if len(shares) == len(_PAPER_ORDER) else range(1, len(shares) + 1)
    named = {number: shares[cluster] for number, cluster in zip(numbers, order, strict=True)}
    return {str(number): named[number] for number in sorted(named)}


def neighbours_alike(points: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    """The share of the nearest neighbours of a point, on average, that are of its class."""
    k = min(_NEIGHBOURS, len(points) - 1)
    nearest = NearestNeighbors(n_neighbors=k).fit(points).kneighbors(return_distance=False)
    return float((labels[nearest] == labels[:, None]).mean())


@register
class Clusters(Study):
    name = "clusters"
    title = "What a cascade sees: embeddings on a plane, and the classes of its clusters (appendix)"
    claims = (
        Claim(
            "on a plane, adapted embeddings tell classes better than frozen ones",
            ("neighbours_alike",),
            "SMN",
            "frozen",
        ),
        Claim(
            "on a plane, embeddings of the cascade tell classes better than frozen ones",
            ("neighbours_alike",),
            "conditional cascade",
            "frozen",
        ),
        Claim(
            "on a plane, embeddings of the cascade differ little from those of one mask",
            ("neighbours_alike",),
            "conditional cascade",
            "SMN",
            equal=True,
        ),
    )

    def entries(self, scale: Scale) -> list[Entry]:
        return [entry for case in scale.cases(DATA) for seed in scale.repetitions() for entry in _of(scale, case, seed)]

    def draw(self, found: Mapping[Entry, float], folder: Path, place: Callable[[Task], Path]) -> Sequence[str]:
        """The curves of clusters, and embeddings on planes, of the first repetition."""
        x, y = "most common classes (% of all)", "share of the cluster's images"
        drawn = curves(found, folder / "clusters.svg", x=x, y=y, measures=("cumulative_share",))
        first: dict[Case, Task] = {}
        for entry in found:
            first.setdefault(entry.case, entry.task)
        for number, task in enumerate(first.values(), 1):
            drawn += planes(place(task) / _POINTS, folder / f"clusters-tsne-{number}.svg", VARIANTS)
        return drawn


def _of(scale: Scale, case: Case, seed: int) -> list[Entry]:
    whole = cascade_of(scale, case, seed)
    task = Pictures(case.subject, whole)

    def entry(setting: str, measure: str, read: Callable[[Result], Any], x: float | None = None) -> Entry:
        return Entry(case, setting, measure, task, read, x=x, seed=seed, steps=steps_of(whole))

    return [
        *(entry(title, "neighbours_alike", _alike(name)) for name, title in VARIANTS.items()),
        *(entry(f"cluster {number}", "cumulative_share", _curve(str(number))) for number in sorted(_PAPER_ORDER)),
        entry("all five clusters", "cumulative_share_at_least", _at_least(5), _FIFTH),
        entry("three clusters", "cumulative_share_at_least", _at_least(3), _FIFTH),
    ]


def _alike(name: str) -> Callable[[Result], float]:
    return lambda result: float(result["neighbours_alike"][name])


def _curve(number: str) -> Callable[[Result], Curve]:
    """By per cent of the classes: of the paper's hundred, each is one."""
    return lambda result: {
        100 * (i + 1) / result["classes"]: share for i, share in enumerate(result["clusters"].get(number, []))
    }


def _at_least(clusters: int) -> Callable[[Result], float | None]:
    """What so many clusters have at least: the share of the most common fifth of the classes in their images."""

    def read(result: Result) -> float | None:
        number = max(1, round(_FIFTH / 100 * result["classes"]))
        shares = sorted((float(each[number - 1]) for each in result["clusters"].values()), reverse=True)
        return shares[clusters - 1] if clusters <= len(shares) else None

    return read
