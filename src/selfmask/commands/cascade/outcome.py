"""What a finished cascade leaves behind besides its file: numbers, and a report that shows the clusters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...cascade.clusters import Clusters
from ...cascade.combination import CONDITIONAL, UNCONDITIONAL
from ...cascade.file import inspect_cascade
from ...cascade.model import DISPATCHER, Cascade, expert_name
from ...data import Images
from ...data.sources import SomeImages
from ...embedding.embedder import FROZEN, Embedder
from ...embedding.vectors import Progress, embed
from ...evaluation.tsne import LEAST, plane_of
from ...files import RunFile
from ...report.cascade import CascadeReportData, ClusterShown, write_cascade_report
from ...training import RunFolder
from .config import CascadeConfig

_SHOWN = 8  # images nearest to a centre, and farthest from it
_POINTS = 1000  # images on a map
_MAPS = {
    FROZEN: "frozen backbone",
    DISPATCHER: "dispatcher",
    CONDITIONAL: "conditional",
    UNCONDITIONAL: "unconditional",
}


def write_outcome(
    cascade: Cascade,
    images: Images,
    clusters: Clusters,
    folder: RunFolder,
    config: CascadeConfig,
    results: Sequence[Mapping[str, Any]],
    progress: Progress,
) -> None:
    """Write report.html and, last, result.json. results: what the dispatcher's run and those of the experts came to."""
    start = time.perf_counter()
    learning = zip([DISPATCHER, *_names(cascade)], [outcome.get("seconds") for outcome in results], strict=True)
    result: dict[str, Any] = {
        "experts": cascade.experts,
        "images": len(clusters.numbers),
        "sizes": clusters.sizes,
        "seed": config.seed,
        "kept": [outcome.get("kept") for outcome in results],
        "expert_changes": _changes(cascade),
        "bytes": sizes_of(cascade, folder),
        "seconds": {name: seconds for name, seconds in learning if seconds},
    }
    progress(1, len(_MAPS) + 2)
    labels, names = _labels(images)
    shown = [_shown(images, clusters, k, results[1 + k], labels) for k in range(cascade.experts)]
    maps, place = _maps(cascade, images, clusters, config.seed, progress)
    colours = labels
    if labels is None:
        names = [str(number) for number in range(cascade.experts)]
        colours = dict(zip(clusters.numbers.tolist(), clusters.experts.tolist(), strict=True))
    asked = RunFolder.read_json(folder.path / RunFile.CONFIG)
    result["seconds"]["report"] = time.perf_counter() - start
    write_cascade_report(
        folder.path / RunFile.REPORT,
        CascadeReportData(
            title=f"A cascade on {asked.get('backbone') or 'a backbone'} for {asked.get('images') or 'images'}",
            config=asked,
            result=result,
            clusters=shown,
            classes=names if labels is not None else (),
            maps=maps,
            colours=[(colours or {})[i] for i in place],
            coloured_by="cluster" if labels is None else "class",
            names=names,
        ),
    )
    folder.write_json(RunFile.RESULT, result)


def sizes_of(cascade: Cascade, folder: RunFolder) -> dict[str, int]:
    """Bytes: of float32 copies, of the paper's one bit a weight, and of ours, part by part."""
    parts = inspect_cascade(folder.path / RunFile.CASCADE).parts
    cascade.masked.set_mask(DISPATCHER)
    weights, networks = cascade.masked.num_masked, 1 + cascade.experts
    masks = sum(size for name, size in parts.items() if name.partition(".")[0] in ("dispatcher", "expert"))
    own = {name: parts[name] for name in ("router", CONDITIONAL, UNCONDITIONAL, "file")}
    return {"float32": 4 * weights * networks, "paper": -(-weights // 8) * networks, "masks": masks, **own}


def _names(cascade: Cascade) -> list[str]:
    return [expert_name(k) for k in range(cascade.experts)]


def _changes(cascade: Cascade) -> list[float]:
    """The share of bits in which each expert differs from the dispatcher."""
    masked = cascade.masked
    masked.set_mask(DISPATCHER)
    first, changes = masked.pack(), []
    for name in _names(cascade):
        masked.set_mask(name)
        own = masked.pack()
        changes.append(own.bits_apart(first) / sum(own.sizes.values()))
    return changes


def _labels(images: Images) -> tuple[dict[int, int] | None, list[str]]:
    """The class of each image, counted from 0, and what the classes are called; numbers below 0 are no classes."""
    if images.labels is None or min(images.labels) < 0:
        return None, []
    used = sorted(set(images.labels))
    place = {label: number for number, label in enumerate(used)}
    names = [images.classes[label] if images.classes and label < len(images.classes) else str(label) for label in used]
    return {i: place[label] for i, label in enumerate(images.labels)}, names


def _shown(
    images: Images, clusters: Clusters, k: int, outcome: Mapping[str, Any], labels: Mapping[int, int] | None
) -> ClusterShown:
    own = clusters.experts == k
    order = clusters.distances[own].argsort(stable=True)
    numbers = clusters.numbers[own][order].tolist()
    counts: list[int] = []
    if labels is not None:
        counts = np.bincount([labels[i] for i in numbers], minlength=max(labels.values()) + 1).tolist()
    return ClusterShown(
        size=len(numbers),
        nearest=[images[i] for i in numbers[:_SHOWN]],
        farthest=[images[i] for i in numbers[::-1][:_SHOWN]],
        outcome=outcome,
        classes=counts,
    )


def _maps(
    cascade: Cascade, images: Images, clusters: Clusters, seed: int, progress: Progress
) -> tuple[dict[str, Any], list[int]]:
    """t-SNE of some images for every kind of vector, and the numbers of these images."""
    step = max(1, len(clusters.numbers) // _POINTS)
    place = clusters.numbers[::step][:_POINTS].tolist()
    rows, kept = embed(
        Embedder("", cascade, cascade.preprocessing, cascade.width).module(list(_MAPS)),
        SomeImages(images, place),
        cascade.preprocessing,
        batch_size=256,
    )
    maps: dict[str, Any] = {}
    for number, (title, vectors) in enumerate(zip(_MAPS.values(), rows.chunk(len(_MAPS), 1), strict=True)):
        if len(vectors) >= LEAST:
            maps[title] = plane_of(vectors, seed)
        progress(number + 2, len(_MAPS) + 2)
    return maps, [place[i] for i in kept]
