"""A picture of which classes are taken for which."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from .figures import middle_out, style, svg

MAX_NAMED = 40  # classes whose names fit beside a matrix
MAX_WRITTEN = 12  # classes whose numbers fit into its cells
_CELL = "#3d84b8"  # reads on light paper and on dark


def confusion_figure(confusion: Sequence[Sequence[int]], classes: Sequence[str], name: str) -> Markup:
    """Rows are true classes, columns what they were taken for; the darker, the larger the share of the row."""
    counts = np.array(confusion, float)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    # The share is the opacity: the picture then suits light paper and dark.
    pixels = np.concatenate([np.broadcast_to(to_rgb(_CELL), (*shares.shape, 3)), shares[..., None]], 2)
    with style(name):
        side = 4.7 if len(classes) <= MAX_WRITTEN else 5.2
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(pixels, interpolation="none")
        axes.grid(visible=False)
        axes.set(xlabel="predicted class", ylabel="true class")
        if len(classes) <= MAX_NAMED:
            names = [middle_out(ascii(each)[1:-1], 18) for each in classes]
            numbers = range(len(classes))
            axes.set_xticks(numbers, names, rotation=90, fontsize=7, parse_math=False)
            axes.set_yticks(numbers, names, fontsize=7, parse_math=False)
        else:
            axes.set(xticks=[], yticks=[])
        if len(classes) <= MAX_WRITTEN:
            for row, column in np.argwhere(shares >= 0.005):
                axes.text(column, row, f"{100 * shares[row, column]:.0f}", ha="center", va="center", fontsize=7)
        return svg(figure, "confusion matrix: true classes by predicted classes")
