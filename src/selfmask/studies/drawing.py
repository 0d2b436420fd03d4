"""Figures of studies: curves of all settings, with the spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..evaluation.metrics import interval
from .scale import Case
from .study import Entry


def curves(
    found: Mapping[Entry, float], file: Path, *, x: str, y: str, measures: Sequence[str], log: bool = False
) -> list[str]:
    """Draw a panel for each case and a curve for each setting; the name of the file."""
    from matplotlib.figure import Figure

    entries = [entry for entry in found if entry.measure in measures and entry.x is not None]
    cases = list(dict.fromkeys(entry.case for entry in entries))
    if not cases:
        return []
    figure = Figure(figsize=(5 * len(cases), 3.8), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        for setting in dict.fromkeys(entry.setting for entry in entries if entry.case == case):
            points = _points(found, case, setting, measures)
            places = sorted(points)
            means, widths = zip(*(points[place] for place in places), strict=True)
            axes.errorbar(places, means, [width or 0.0 for width in widths], marker="o", capsize=3, label=setting)
        axes.set(title=str(case), xlabel=x, ylabel=y, xscale="log" if log else "linear")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(file, metadata={"Date": None})
    return [file.name]


def bands(found: Mapping[Entry, float], file: Path, *, x: str, y: str, middle: str, width: str) -> list[str]:
    """The same with a band about each curve, and a panel for each first word of a setting.

    middle, width: the measures of the curve, and of what lies to either side of it.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[Case, str], dict[str, dict[str, dict[float, float]]]] = {}
    for entry, value in found.items():
        if entry.x is not None and entry.measure in (middle, width):
            how, _, kind = entry.setting.partition(" ")
            curve = panels.setdefault((entry.case, how), {}).setdefault(kind, {middle: {}, width: {}})
            curve[entry.measure][entry.x] = value
    if not panels:
        return []
    figure = Figure(figsize=(5 * len(panels), 3.8), layout="constrained")
    for axes, ((case, how), kinds) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for kind, curve in kinds.items():
            places = sorted(curve[middle])
            values, widths = ([curve[each].get(at, 0.0) for at in places] for each in (middle, width))
            if kind.startswith("downsample"):  # here and there among the layers
                axes.errorbar(places, values, widths, fmt="*", capsize=3, label=kind)
                continue
            style = "o--" if kind.endswith("biases") else "o-"
            (line,) = axes.plot(places, values, style, markersize=3, label=kind)
            edges = np.array(values) - widths, np.array(values) + widths
            axes.fill_between(places, *edges, color=line.get_color(), alpha=0.15)
        axes.set(xlabel=x, ylabel=y)
        axes.set_title(f"{how}: {case.subject.backbone}\n{case.subject.data}", fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(file, metadata={"Date": None})
    return [file.name]


def planes(points: Path, file: Path, titles: Mapping[str, str]) -> list[str]:
    """Points on planes, one beside the other, in the colours of their labels; nothing where there are no points."""
    from matplotlib.figure import Figure

    if not points.exists():
        return []
    figure = Figure(figsize=(4 * len(titles), 4), layout="constrained")
    with np.load(points) as stored:
        for axes, (name, title) in zip(figure.subplots(1, len(titles), squeeze=False)[0], titles.items(), strict=True):
            axes.scatter(*stored[name].T, c=stored["labels"], cmap="tab20", s=4, linewidths=0)
            axes.set(title=title, xticks=[], yticks=[])
    figure.savefig(file, metadata={"Date": None})
    return [file.name]


def _points(
    found: Mapping[Entry, float], case: Case, setting: str, measures: Sequence[str]
) -> dict[float, tuple[float, float | None]]:
    values: dict[float, list[float]] = {}
    for entry, value in found.items():
        if (entry.case, entry.setting) == (case, setting) and entry.measure in measures and entry.x is not None:
            values.setdefault(entry.x, []).append(value)
    return {place: interval(each) for place, each in values.items()}
