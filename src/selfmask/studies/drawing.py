"""Figures of studies: curves of all settings, with the spread over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..evaluation.metrics import interval
from .scale import Case
from .study import Entry


@contextmanager
def _drawn(file: Path, panels: int, width: float, height: float) -> Iterator[Sequence[Any]]:
    """Panels side by side, with the look of reports; what is drawn in them is written. The same gives the same file."""
    from matplotlib.figure import Figure

    from ..report.figures import style

    with style(file.stem):
        figure = Figure(figsize=(width * panels, height), layout="constrained")
        yield list(figure.subplots(1, panels, squeeze=False)[0])
        figure.savefig(file, metadata={"Date": None})


def curves(
    found: Mapping[Entry, float], file: Path, *, x: str, y: str, measures: Sequence[str], log: bool = False
) -> list[str]:
    """Draw a panel for each case and a curve for each setting; the name of the file."""
    entries = [entry for entry in found if entry.measure in measures and entry.x is not None]
    cases = list(dict.fromkeys(entry.case for entry in entries))
    if not cases:
        return []
    with _drawn(file, len(cases), 5, 3.8) as panels:
        for axes, case in zip(panels, cases, strict=True):
            for setting in dict.fromkeys(entry.setting for entry in entries if entry.case == case):
                points = _points(found, case, setting, measures)
                places = sorted(points)
                means, widths = zip(*(points[place] for place in places), strict=True)
                axes.errorbar(places, means, [width or 0.0 for width in widths], marker="o", capsize=3, label=setting)
            axes.set(title=str(case), xlabel=x, ylabel=y, xscale="log" if log else "linear")
            axes.legend(fontsize=8)
    return [file.name]


def bands(found: Mapping[Entry, float], file: Path, *, x: str, y: str, middle: str, width: str) -> list[str]:
    """The same with a band about each curve, and a panel for each first word of a setting.

    middle, width: the measures of the curve, and of what lies to either side of it.
    """
    panels: dict[tuple[Case, str], dict[str, dict[str, dict[float, float]]]] = {}
    for entry, value in found.items():
        if entry.x is not None and entry.measure in (middle, width):
            how, _, kind = entry.setting.partition(" ")
            curve = panels.setdefault((entry.case, how), {}).setdefault(kind, {middle: {}, width: {}})
            curve[entry.measure][entry.x] = value
    if not panels:
        return []
    with _drawn(file, len(panels), 5, 3.8) as drawn:
        for axes, ((case, how), kinds) in zip(drawn, panels.items(), strict=True):
            for kind, curve in kinds.items():
                places = sorted(curve[middle])
                values, widths = ([curve[each].get(at, 0.0) for at in places] for each in (middle, width))
                if kind.startswith("downsample"):  # here and there among the layers
                    axes.errorbar(places, values, widths, fmt="*", capsize=3, label=kind)
                    continue
                style = "o--" if kind.endswith("biases") else "o-"
                (line,) = axes.plot(places, values, style, label=kind)
                edges = np.array(values) - widths, np.array(values) + widths
                axes.fill_between(places, *edges, color=line.get_color(), alpha=0.15)
            axes.set(xlabel=x, ylabel=y)
            axes.set_title(f"{how}: {case.subject.backbone}\n{case.subject.data}", fontsize=8)
            axes.legend(fontsize=8)
    return [file.name]


def planes(points: Path, file: Path, titles: Mapping[str, str]) -> list[str]:
    """Points on planes, one beside the other, in the colours of their labels; nothing where there are no points."""
    if not points.exists():
        return []
    with np.load(points) as stored, _drawn(file, len(titles), 4, 4) as panels:
        for axes, (name, title) in zip(panels, titles.items(), strict=True):
            axes.scatter(*stored[name].T, c=stored["labels"], cmap="tab20", s=4, linewidths=0)
            axes.set(title=title, xticks=[], yticks=[])
    return [file.name]


def _points(
    found: Mapping[Entry, float], case: Case, setting: str, measures: Sequence[str]
) -> dict[float, tuple[float, float | None]]:
    values: dict[float, list[float]] = {}
    for entry, value in found.items():
        if (entry.case, entry.setting) == (case, setting) and entry.measure in measures and entry.x is not None:
            values.setdefault(entry.x, []).append(value)
    return {place: interval(each) for place, each in values.items()}
