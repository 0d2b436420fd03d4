"""The report of a cascade: what it is made of, what fell into which cluster, and what it costs to keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray
from torch import Tensor

from ..files import write_atomically
from .examples import BUDGET, MAX_NEIGHBOURS, SIDES, thumbnail
from .figures import DARK, LIGHT, Numbers, percent, short, style, svg
from .page import Size, duration, flat, in_bytes, is_finite, plain, template, times

MAX_CLUSTERS = 20  # that are shown one by one
MAX_NAMES = 20  # in the legend of the maps; as many as there are colours
MAX_CLASSES = 3  # named on a card

# They read on light paper and on dark; the ten strong ones first.
_PAIRS = matplotlib.color_sequences["tab20"]
COLOURS = [to_hex(colour) for colour in (*_PAIRS[::2], *_PAIRS[1::2])]

_SIZE = (5.2, 2.9)  # inches; as the figures of a run
_MAP, _EDGE, _DOT = 400, 6, 2.6  # the side of a map, its empty edge and its points


@dataclass(frozen=True)
class ClusterShown:
    """One cluster, as the page shows it.

    size: how many training images.
    nearest, farthest: uint8 images [3, H, W]; those nearest to its centre, the nearest first, and those farthest from
        it, the farthest first.
    outcome: the result of the expert's run. `kept` is "mask" where the expert improved on the dispatcher and "start"
        where it is the dispatcher; `quality_before`, `quality_after`, `active`, `steps` and `seconds` are shown.
    classes: how many images of each class, by class number; empty without labels.
    """

    size: int
    nearest: Sequence[Tensor]
    farthest: Sequence[Tensor]
    outcome: Mapping[str, Any]
    classes: Sequence[int] = ()


@dataclass(frozen=True)
class CascadeReportData:
    """All that the report of a cascade shows. What is missing or empty is left out of the page.

    result: the numbers of the run. `bytes` are those of "float32" (a copy of the masked weights for each mask), "paper"
        (one bit a weight for each mask), "masks", "router", "conditional", "unconditional" and "file"; `seconds` those
        of each stage; `expert_changes` are the shares of bits in which the experts differ from the dispatcher.
    classes: the names of the classes.
    maps: t-SNE places [n, 2] under the name of the features.
    colours: of each of the n points, its class number or its cluster, which `coloured_by` tells; `names` are what the
        numbers mean.
    """

    title: str
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    clusters: Sequence[ClusterShown]
    classes: Sequence[str] = ()
    maps: Mapping[str, NDArray[np.floating[Any]]] = field(default_factory=dict)
    colours: Sequence[int] = ()
    coloured_by: str = "cluster"
    names: Sequence[str] = ()


@dataclass(frozen=True)
class ClusterCard:
    """One cluster in words and thumbnails, ready for the page."""

    size: int
    kept: str
    facts: list[str]
    classes: list[str]
    rows: dict[str, list[str]]


def write_cascade_report(path: Path, data: CascadeReportData) -> None:
    """Write the page, whole or not at all. The same data gives the same bytes."""
    write_atomically(path, render(data).encode("utf-8", "backslashreplace"))


def render(data: CascadeReportData) -> str:
    """The page as text."""
    kept, cards = [cluster.outcome.get("kept") for cluster in data.clusters], _cards(data)
    return template("cascade.html").render(
        title=data.title,
        light=LIGHT,
        dark=DARK,
        facts=dict(_facts(data)),
        sizes=list(_sizes(data)),
        clusters=len(data.clusters),
        max_clusters=MAX_CLUSTERS,
        improved=kept.count("mask"),
        unchanged=kept.count("start"),
        members=members_figure([cluster.size for cluster in data.clusters]),
        mixture=mixture_figure(_class_counts(data)),
        cards=cards,
        pictured=any(row for card in cards for row in card.rows.values()),
        columns=MAX_NEIGHBOURS,
        palette=COLOURS,
        maps={name: map_figure(places, data.colours, name) for name, places in data.maps.items() if len(places)},
        points=max(map(len, data.maps.values()), default=0),
        coloured_by=data.coloured_by if len(data.colours) else None,
        names=data.names if len(data.colours) and len(data.names) <= MAX_NAMES else (),
        repeated=max(data.colours, default=0) >= len(COLOURS),
        result=dict(flat(data.result)),
        config=dict(flat(data.config)),
    )


def cumulative_shares(counts: Sequence[int] | NDArray[np.int64]) -> Numbers:
    """The share of the images that the most common class makes up, that the two most common make up, and so on."""
    ordered = np.sort(np.asarray(counts, float))[::-1]
    shares: Numbers = ordered.cumsum() / max(1, ordered.sum())
    return shares


def _class_counts(data: CascadeReportData) -> NDArray[np.int64]:
    """A row a cluster, a column a class."""
    width = max([len(data.classes), *(len(cluster.classes) for cluster in data.clusters)])
    counts = np.zeros((len(data.clusters), width), np.int64)
    for row, cluster in zip(counts, data.clusters, strict=True):
        row[: len(cluster.classes)] = cluster.classes
    return counts


def _facts(data: CascadeReportData) -> Iterator[tuple[str, str]]:
    if data.clusters:
        yield "experts", f"{len(data.clusters):,}"
        yield "training images", f"{sum(cluster.size for cluster in data.clusters):,}"
    seconds = [value for value in (data.result.get("seconds") or {}).values() if is_finite(value)]
    if seconds:
        yield "time for all stages", duration(sum(seconds))
    if is_finite(size := (data.result.get("bytes") or {}).get("file")):
        yield "cascade file", in_bytes(size)


def _sizes(data: CascadeReportData) -> Iterator[Size]:
    """The ways to store the cascade, and its parts; compared with what the paper counts."""
    titles = {
        "float32": "float32 copies, one for each mask",
        "paper": "one bit per weight for each mask",
        "masks": "mask files of dispatcher and experts",
        "router": "router",
        "conditional": "PCA, conditional",
        "unconditional": "PCA, unconditional",
        "file": "cascade.smn, total",
    }
    found = data.result.get("bytes") or {}
    known = {name: size for name in titles if is_finite(size := found.get(name)) and size > 0}
    for name, size in known.items():
        compared = times(size, known["paper"]) if "paper" in known else ""
        yield Size(titles[name], f"{size:,}", compared, 100 * size / max(known.values()))


def _cards(data: CascadeReportData) -> list[ClusterCard]:
    shown, counts = data.clusters[:MAX_CLUSTERS], _class_counts(data)
    changes = data.result.get("expert_changes") or ()
    rows = _thumbnails([row for cluster in shown for row in (cluster.nearest, cluster.farthest)])
    return [
        ClusterCard(
            cluster.size,
            str(cluster.outcome.get("kept", "")),
            list(_card_facts(cluster.outcome, changes[number] if number < len(changes) else None)),
            _most_common(counts[number], data.classes),
            {"nearest": rows[2 * number], "farthest": rows[2 * number + 1]},
        )
        for number, cluster in enumerate(shown)
    ]


def _card_facts(outcome: Mapping[str, Any], change: Any) -> Iterator[str]:
    before, after = outcome.get("quality_before"), outcome.get("quality_after")
    if is_finite(before) and is_finite(after):
        yield f"quality {before:.4f} before, {after:.4f} after"
    if is_finite(change):
        yield f"{percent(change)} of mask bits changed"
    if is_finite(active := outcome.get("active")):
        yield f"{percent(active)} of weights active"
    if is_finite(steps := outcome.get("steps")):
        yield f"{steps:,} steps"
    if is_finite(seconds := outcome.get("seconds")):
        yield duration(seconds)


def _most_common(counts: NDArray[np.int64], names: Sequence[str]) -> list[str]:
    """The classes that most images of a cluster are of, with their shares."""
    order = [int(number) for number in np.argsort(-counts, kind="stable")[:MAX_CLASSES] if counts[number]]
    return [
        f"{names[number] if number < len(names) else f'class {number}'} {percent(float(counts[number] / counts.sum()))}"
        for number in order
    ]


def _thumbnails(rows: Sequence[Sequence[Tensor]]) -> list[list[str]]:
    """As large as the page's budget allows."""
    made: list[list[str]] = []
    for side in SIDES:
        made = [[thumbnail(image, side) for image in row[:MAX_NEIGHBOURS]] for row in rows]
        if sum(len(uri) for row in made for uri in row) <= BUDGET:
            break
    return made


def members_figure(sizes: Sequence[int]) -> Markup | None:
    """A bar a cluster: how many images it has."""
    if not sizes:
        return None
    numbers = range(len(sizes))
    with style("members"):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.bar(numbers, sizes, width=0.75, color=[COLOURS[number % len(COLOURS)] for number in numbers])
        axes.set_axisbelow(True)
        if len(sizes) <= MAX_CLUSTERS:
            axes.set_xticks(numbers)
            for number, size in enumerate(sizes):
                axes.annotate(
                    short(size),
                    (number, size),
                    xytext=(0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                    color=LIGHT["soft"],
                )
        else:
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y)))
        axes.set(xlabel="cluster", title="training images")
        axes.set_xlim(-0.6, len(sizes) - 0.4)
        return svg(figure, "training images of each cluster")


def mixture_figure(counts: NDArray[np.int64]) -> Markup | None:
    """The paper's figure of clusters: the share of a cluster that its x most common classes make up, a line each."""
    if not counts.sum():
        return None
    classes = range(1, counts.shape[1] + 1)
    marker = "o" if len(classes) <= 60 else None
    with style("mixture"):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        for number, row in enumerate(counts[:MAX_CLUSTERS]):
            if row.any():
                axes.plot(classes, cumulative_shares(row), color=COLOURS[number], marker=marker)
        axes.plot(classes, cumulative_shares(counts.sum(0)), color=LIGHT["ink"], dashes=(4, 3))
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set(xlabel="classes, most common in the cluster first", title="share of the cluster's images")
        axes.set_ylim(0, 1.03)
        return svg(figure, "share of each cluster that its most common classes make up")


def map_figure(places: NDArray[np.floating[Any]], colours: Sequence[int], name: str) -> Markup:
    """A point an image. One path for all points of a colour takes a tenth of the bytes that matplotlib's do."""
    low, high = places.min(0), places.max(0)
    scale = (_MAP - 2 * _EDGE) / (float((high - low).max()) or 1.0)
    at = (places - (low + high) / 2) * scale + _MAP / 2
    numbers = np.asarray(colours if len(colours) else [0] * len(at)) % len(COLOURS)
    # A style of each path's own: matplotlib's figures carry rules that reach all of the page, and caps would be flat.
    paths = [
        f'<path style="stroke: {COLOURS[number]}; stroke-linecap: round" d="{_dots(at[numbers == number])}"/>'
        for number in np.unique(numbers)
    ]
    return Markup(  # noqa: S704
        f'<svg role="img" aria-label="t-SNE map: {escape(plain(name))}" viewBox="0 0 {_MAP} {_MAP}" '
        f'stroke-width="{_DOT}">{"".join(paths)}</svg>'
    )


def _dots(at: NDArray[np.floating[Any]]) -> str:
    return "".join(f"M{x:.1f} {y:.1f}h0" for x, y in at)
