"""The figures of a report: curves and bars as SVG that takes its colours from the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import matplotlib.style
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

Log = Sequence[Mapping[str, Any]]
Numbers = NDArray[np.float64]

# Drawn with the light colours; in the SVG each becomes a CSS variable of the page, so that dark mode can change it.
LIGHT = {
    "ink": "#1d2125",
    "soft": "#646b73",
    "line": "#dcdfe2",
    "tint": "#eef0f2",
    "page": "#fdfdfc",
    "accent": "#24618f",
    "second": "#8a5a12",
    "warn": "#b3402a",
}
DARK = {
    "ink": "#e4e6e8",
    "soft": "#9aa2aa",
    "line": "#343a40",
    "tint": "#23282d",
    "page": "#15181b",
    "accent": "#74b3e0",
    "second": "#d9a75a",
    "warn": "#ef8a70",
}
MAX_POINTS = 400
MAX_BARS = 64  # a ResNet-50 masks 61 tensors

_WIDTH = 5.2  # inches of 72 points; narrow, so that a phone shows the words at a readable size
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # words stay words: small, searchable, in the font of the page
    "font.size": 9,
    "axes.edgecolor": LIGHT["line"],
    "axes.labelcolor": LIGHT["soft"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titlecolor": LIGHT["soft"],
    "axes.formatter.useoffset": False,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.6,
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.major.width": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 3,
    "lines.solid_joinstyle": "round",
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def curve(log: Log, key: str) -> tuple[Numbers, Numbers]:
    """Steps and values of one logged number, in order of steps; NaN where it is no number, nothing if never logged.

    A resumed run may log a step twice: the later line counts.
    """
    by_step = {float(line["step"]): _number(line[key]) for line in log if key in line and _is_step(line.get("step"))}
    steps = sorted(by_step)
    return np.array(steps, float), np.array([by_step[step] for step in steps], float)


def thin(steps: Numbers, values: Numbers, limit: int = MAX_POINTS) -> tuple[Numbers, Numbers]:
    """At most `limit` points: the means over equal stretches of the log, of the values that are numbers."""
    if len(steps) <= limit:
        return steps, values
    parts = np.array_split(np.arange(len(steps)), limit)
    means = [values[part][np.isfinite(values[part])] for part in parts]
    return (
        np.array([steps[part].mean() for part in parts]),
        np.array([mean.mean() if len(mean) else math.nan for mean in means]),
    )


def loss_figure(log: Log) -> Markup | None:
    """The loss over steps, and ln K, where a model that knows nothing stands."""
    steps, losses = curve(log, "loss")
    if not np.isfinite(losses).any():
        return None
    levels = curve(log, "ln_k")[1]
    with style("loss"):
        figure, (axes,) = _panels(1)
        _draw(axes, steps, losses, LIGHT["accent"], three_digits)
        if np.isfinite(levels).any():
            level = float(levels[np.isfinite(levels)][-1])
            axes.axhline(level, color=LIGHT["second"], linewidth=1, dashes=(4, 3))
            axes.annotate(
                f"ln K = {level:.2f}",
                (1, level),
                xycoords=("axes fraction", "data"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="right",
                color=LIGHT["second"],
            )
        lost = steps[~np.isfinite(losses)]
        for step in lost[:: max(1, len(lost) // 100)]:
            axes.axvline(step, ymax=0.06, color=LIGHT["warn"], linewidth=1)
        axes.set_title("loss")
        return svg(figure, "loss over steps")


def mask_figure(log: Log) -> Markup | None:
    """How many weights are on, and how many switched, over steps: one panel each, no second axis to misread."""
    panels = [
        (title, key, colour)
        for title, key, colour in (
            ("share of active weights", "active", LIGHT["accent"]),
            ("flips per step", "flips", LIGHT["second"]),
        )
        if np.isfinite(curve(log, key)[1]).any()
    ]
    if not panels:
        return None
    with style("mask"):
        figure, all_axes = _panels(len(panels))
        for axes, (title, key, colour) in zip(all_axes, panels, strict=True):
            share = key == "active"
            _draw(axes, *curve(log, key), colour, percent if share else short)
            axes.yaxis.set_major_formatter(PercentFormatter(1) if share else FuncFormatter(lambda y, _: short(y)))
            axes.set_title(title)
        return svg(figure, " and ".join(title for title, _, _ in panels))


def quality_figure(log: Log, before: object = None, kept: object = None) -> Markup | None:
    """The label-free quality over steps, if it was logged: from `before`, at step 0; with a ring at the step kept."""
    if not np.isfinite(curve(log, "quality")[1]).any():
        return None
    steps, values = curve([{"step": 0, "quality": before}, *log] if before is not None else log, "quality")
    with style("quality"):
        figure, (axes,) = _panels(1)
        _draw(axes, steps, values, LIGHT["accent"], three_digits)
        for place in np.flatnonzero((steps == _number(kept)) & np.isfinite(values)):
            point = float(steps[place]), float(values[place])
            axes.plot(*point, "o", markersize=8, markerfacecolor="none", color=LIGHT["second"])
            axes.annotate(
                f"step {point[0]:,.0f} is kept",
                point,
                xytext=(0, 9),
                textcoords="offset points",
                ha="left" if place == 0 else "right",
                color=LIGHT["second"],
            )
            axes.margins(y=0.15)
        axes.set_title("quality without labels")
        return svg(figure, "label-free quality over steps")


def layers_figure(active_by_layer: Mapping[str, float]) -> Markup | None:
    """One bar per tensor, or per group of tensors if they are many: the share of its weights that is on."""
    if not active_by_layer:
        return None
    bars = grouped(active_by_layer)
    heights = range(len(bars))
    with style("layers"):
        figure = Figure(figsize=(4.7, 0.35 + 0.165 * len(bars)), layout="constrained")
        axes = figure.add_subplot()
        axes.barh(heights, 1, height=0.5, color=LIGHT["tint"])
        axes.barh(heights, [0 if math.isnan(share) else share for _, share in bars], height=0.5, color=LIGHT["accent"])
        for height, (_, share) in enumerate(bars):
            colour = LIGHT["soft"] if share > 0 else LIGHT["warn"]
            axes.text(1.015, height, percent(share), va="center_baseline", fontsize=8, color=colour)
        # `.weight` goes without saying; ascii() shows odd characters as escapes: they may be none that XML can hold.
        axes.set_yticks(
            heights,
            [middle_out(ascii(name)[1:-1].removesuffix(".weight")) for name, _ in bars],
            fontsize=8,
            parse_math=False,
        )
        axes.set(xlim=(0, 1), ylim=(len(bars) - 0.4, -0.6))
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(visible=False)
        return svg(figure, "share of active weights, by layer")


def grouped(shares: Mapping[str, float], limit: int = MAX_BARS) -> list[tuple[str, float]]:
    """At most `limit` bars in network order: tensors, else the means of those whose names begin alike, else of runs."""
    names = list(shares)
    if len(names) <= limit:
        return list(shares.items())
    for depth in range(max(name.count(".") for name in names), 0, -1):
        starts = [".".join(name.split(".")[:depth]) for name in names]
        by_start = groupby(zip(starts, names, strict=True), key=itemgetter(0))
        groups = [(start, [name for _, name in pairs]) for start, pairs in by_start]
        if limit / 8 <= len(groups) <= limit:
            break
    else:  # the names do not tell what belongs together
        cuts = [len(names) * part // limit for part in range(limit + 1)]
        groups = [(names[first], names[first:end]) for first, end in pairwise(cuts)]
    return [
        (f"{start} ({len(group)})" if len(group) > 1 else group[0], float(np.mean([shares[name] for name in group])))
        for start, group in groups
    ]


def short(number: float) -> str:
    """12,345 as 12.3k: for axes, and for sizes."""
    size, letter = next(((s, x) for s, x in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(number) >= s), (1.0, ""))
    return f"{three_digits(number / size)}{letter}"


def three_digits(number: float) -> str:
    """About three digits, never an exponent for what people read as a number."""
    if not 1e-3 <= abs(number) < 1e9:
        return f"{number:.3g}"
    text = f"{number:,.{max(0, 2 - math.floor(math.log10(abs(number))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    """A share in percent; it says 0% or 100% only of what is exactly that."""
    if math.isnan(share):
        return "not a number"
    if share in (0, 1):
        return f"{share:.0%}"
    for digits in (1, 2, 3):
        text = f"{share:.{digits}%}"
        if float(text[:-1]) not in (0, 100):
            return text
    return ">99.999%" if share > 0.5 else "<0.001%"


def middle_out(name: str, longest: int = 34) -> str:
    return name if len(name) <= longest else name[: longest // 2 - 1] + "…" + name[-longest // 2 :]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) <= 1e30 else math.nan


def _is_step(value: object) -> bool:
    return not math.isnan(_number(value))


def style(name: str) -> Any:
    # From the defaults, whatever the user's own matplotlib settings are; ids by name, as figures share a page.
    return matplotlib.style.context(["default", _STYLE | {"svg.hashsalt": f"selfmask {name}"}])


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH, 2.9), layout="constrained")
    axes = list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    for each in axes:
        each.yaxis.set_major_locator(MaxNLocator(5 if count == 1 else 3, steps=[1, 2, 5, 10]))
    return figure, axes


def _draw(axes: Axes, steps: Numbers, values: Numbers, colour: str, label: Any) -> None:
    """One curve, with its last value written beside it."""
    steps, values = thin(steps, values)
    axes.plot(steps, values, color=colour, marker="o" if len(steps) <= 60 else None)
    last = int(np.flatnonzero(np.isfinite(values))[-1])
    axes.annotate(
        label(float(values[last])),
        (float(steps[last]), float(values[last])),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        annotation_clip=False,
    )


def svg(figure: Figure, words: str) -> Markup:
    """The figure as an element to stand in HTML: no prologue, no metadata, no idle ids, colours by name."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=_NO_METADATA, transparent=True)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    used = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", svg)
    for name, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{name}, {colour})")
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(words)}"', 1))  # noqa: S704
