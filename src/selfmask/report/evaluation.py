"""The report of an evaluation: numbers, what is taken for what, and which classes gain or lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ..evaluation.measuring import MAP, Evaluation, Measured
from ..evaluation.metrics import TOP
from ..evaluation.protocols import KNN, title_of
from ..files import write_atomically
from .confusion import confusion_figure
from .figures import DARK, LIGHT, middle_out, percent, style, svg
from .page import template

MAX_BARS = 40


def write_evaluation(path: Path, evaluation: Evaluation, data: str, seen: int | None = None) -> None:
    """Write the page, whole or not at all; it needs no network. seen: test images that were learned from."""
    write_atomically(path, render(evaluation, data, seen).encode("utf-8", "backslashreplace"))


def render(evaluation: Evaluation, data: str, seen: int | None = None) -> str:
    # The table has them all; figures are of vectors without a map, and of k-NN with the first k.
    shown = {
        key: {variant: found for variant, found in variants.items() if not variant.endswith(MAP)}
        for key, variants in evaluation.results.items()
        if not key.startswith(f"{KNN}_")
    }
    return template("evaluation.html").render(
        title=f"{evaluation.name} on {data}",
        light=LIGHT,
        dark=DARK,
        evaluation=evaluation,
        seen=seen,
        titles={key: title_of(key, evaluation.settings) for key in evaluation.results},
        variants=evaluation.titles,
        with_top5=len(evaluation.classes) > TOP,
        share=_share,
        bars={protocol: classes_figure(variants, protocol) for protocol, variants in shown.items()},
        matrices={
            protocol: {
                variant: confusion_figure(found.confusion, evaluation.classes, f"{protocol} {variant}")
                for variant, found in variants.items()
            }
            for protocol, variants in shown.items()
        },
        max_bars=MAX_BARS,
        tested=len(next(iter(next(iter(evaluation.results.values())).values())).per_class),
    )


def _share(mean: float, half_width: float | None) -> str:
    return f"{mean:.1%}" if half_width is None else f"{mean:.1%} ± {100 * half_width:.1f}"


def _colours(variants: Sequence[str]) -> dict[str, str]:
    """The first variant recedes, what was learned stands out, and what lies between has a colour of its own."""
    colours = dict.fromkeys(variants, LIGHT["accent"])
    if len(variants) > 1:
        colours[variants[0]] = LIGHT["soft"]
    if len(variants) > 2:
        colours[variants[1]] = LIGHT["second"]
    return colours


def classes_figure(variants: Mapping[str, Measured], name: str) -> Markup:
    """Accuracy class by class, the worst first: the frozen backbone above, what was learned below it."""
    last = list(variants.values())[-1]
    shown = sorted(last.per_class, key=lambda each: last.per_class[each])[:MAX_BARS]
    heights = np.arange(len(shown))
    colours = _colours(list(variants))
    with style(f"classes {name}"):
        figure = Figure(figsize=(4.7, 0.5 + (0.19 + 0.1 * len(variants)) * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        thick = 0.7 / len(variants)
        for place, (variant, found) in enumerate(variants.items()):
            shares = [found.per_class[each] for each in shown]
            at = heights + (place - (len(variants) - 1) / 2) * thick
            axes.barh(at, shares, height=0.85 * thick, color=colours[variant])
            for height, share in zip(at, shares, strict=True):
                axes.text(share + 0.01, height, percent(share), va="center", fontsize=6.5, color=colours[variant])
        axes.set_yticks(heights, [middle_out(ascii(each)[1:-1]) for each in shown], fontsize=8, parse_math=False)
        axes.set(xlim=(0, 1.08), ylim=(len(shown) - 0.5, -0.5))
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(visible=False)
        return svg(figure, "accuracy of each class")
