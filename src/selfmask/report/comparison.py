"""A comparison as a table, as Markdown, and as a figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..evaluation.metrics import interval

_MARKS = "osD^vP*X<"
LABELS = {
    "frozen": "frozen + linear probe",
    "frozen+map": "frozen + map + linear probe",
    "self-mask": "self-mask + linear probe",
    "self-mask+map": "self-mask + map + linear probe",
    "mask": "supervised mask",
    "full": "full fine-tuning",
    "linear": "linear head, trained",
    "lora": "LoRA",
    "bitfit": "BitFit",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One method with one share of the labels and one seed."""

    method: str
    share: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.share:g}-{self.seed}"

    @property
    def title(self) -> str:
        return f"{self.method}, {self.share:.4g} of the labels, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The finished cells: `results[cell]` has accuracy, bytes and seconds."""

    results: Mapping[Cell, Mapping[str, Any]]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(cell.method for cell in self.results))

    @property
    def shares(self) -> list[float]:
        return sorted({cell.share for cell in self.results})

    def accuracy(self, method: str, share: float) -> tuple[float, float | None] | None:
        """Mean over seeds, and half the width of its 95 % interval; None if no such cell came to an end."""
        found = [numbers["accuracy"] for cell, numbers in self._of(method) if cell.share == share]
        return interval(found) if found else None

    def bytes(self, method: str) -> float:
        """What one task takes on a disk: the mean over shares and seeds."""
        found = [float(numbers["bytes"]) for _, numbers in self._of(method)]
        return sum(found) / max(1, len(found))

    def _of(self, method: str) -> Iterator[tuple[Cell, Mapping[str, Any]]]:
        done = ((cell, numbers) for cell, numbers in self.results.items() if "accuracy" in numbers)
        return ((cell, numbers) for cell, numbers in done if cell.method == method)


def rows(comparison: Comparison) -> list[list[str]]:
    """A row for each method: bytes a task, and accuracy in points for each share of the labels."""
    return [
        [
            LABELS[method],
            f"{comparison.bytes(method):,.0f}" if comparison.bytes(method) else "-",
            *(_accuracy(comparison.accuracy(method, share)) for share in comparison.shares),
        ]
        for method in comparison.methods
    ]


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """All cells, and what they come to."""
    summary = [
        {
            "method": method,
            "share": share,
            "accuracy": found[0],
            "interval": found[1],
            "bytes": comparison.bytes(method),
        }
        for method in comparison.methods
        for share in comparison.shares
        if (found := comparison.accuracy(method, share)) is not None
    ]
    return {"summary": summary, "cells": {cell.name: dict(numbers) for cell, numbers in comparison.results.items()}}


def head(comparison: Comparison) -> list[str]:
    return ["", "bytes per task", *(f"{100 * share:g} %" for share in comparison.shares)]


def markdown(comparison: Comparison) -> str:
    lines = [head(comparison), ["---"] * (2 + len(comparison.shares)), *rows(comparison)]
    return "".join([*(f"| {' | '.join(line)} |\n" for line in lines), *(f"\n{note}\n" for note in notes(comparison))])


def draw(comparison: Comparison, path: Path) -> None:
    """Accuracy against the share of labels, and against the bytes of a task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    by_share, by_bytes = figure.subplots(1, 2, sharey=True)
    for number, method in enumerate(comparison.methods):
        colour, mark = f"C{number}", _MARKS[number % len(_MARKS)]
        found = [(share, comparison.accuracy(method, share)) for share in comparison.shares]
        known = [(share, *numbers) for share, numbers in found if numbers is not None]
        if not known:  # all its runs diverged
            continue
        shares, means, widths = zip(*known, strict=True)
        errors = [100 * (width or 0.0) for width in widths]
        means = tuple(100 * mean for mean in means)
        by_share.errorbar(
            [100 * share for share in shares], means, errors, color=colour, marker=mark, capsize=3, label=LABELS[method]
        )
        size = comparison.bytes(method)
        sizes = [12 + 60 * (i + 1) / len(known) for i in range(len(known))]
        by_bytes.scatter([size] * len(known), means, s=sizes, color=colour, marker=mark)
    by_share.set(xscale="log", xlabel="share of labels, %", ylabel="test accuracy, %")
    by_share.set_xticks([100 * share for share in comparison.shares], [f"{100 * s:g}" for s in comparison.shares])
    by_share.minorticks_off()
    by_share.legend(fontsize=8)
    by_bytes.set(xscale="log", xlabel="bytes per task (larger marks: more labels)")
    for axes in (by_share, by_bytes):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def notes(comparison: Comparison) -> list[str]:
    """What the numbers leave out: classes that a draw of labels has none of."""
    most = dict.fromkeys(comparison.shares, 0)
    for cell, numbers in comparison.results.items():
        most[cell.share] = max(most[cell.share], len(numbers.get("unseen_classes", ())))
    return [
        f"With {100 * share:g} % of the labels, up to {count:,} classes have none and are never predicted."
        for share, count in most.items()
        if count
    ]


def _accuracy(numbers: tuple[float, float | None] | None) -> str:
    if numbers is None:
        return "-"
    mean, width = numbers
    return f"{100 * mean:.1f}" + (f" ± {100 * width:.1f}" if width else "")  # of all labels there is one choice only
