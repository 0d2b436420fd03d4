"""Methods that learned without labels, side by side: a row for each, and a column for everything that was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..evaluation.metrics import interval

ROWS = {
    "frozen": "frozen backbone",
    "adabn": "batch-norm statistics (AdaBN)",
    "mask": "mask",
    "full": "full fine-tuning",
    "lora": "LoRA",
    "bitfit": "BitFit",
}
"""What to call a method; one that is not here has its own name."""
SHARES = {
    "knn_20": "k-NN, k = 20",
    "knn_200": "k-NN, k = 200",
    "probe_10": "probe, 10 labels a class",
    "probe": "probe, all labels",
}
"""Columns that are shares of the test images; others that a result may have come after them."""


@dataclasses.dataclass(frozen=True)
class RivalCell:
    """One method with one seed."""

    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}"

    @property
    def title(self) -> str:
        return f"{ROWS.get(self.method, self.method)}, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Rivals:
    """The finished cells: `results[cell]` has `columns` (what was measured with labels, by name), `bytes` and
    `seconds`; where there was a gate, `quality_before`, `quality_after` and `kept`, too."""

    results: Mapping[RivalCell, Mapping[str, Any]]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(cell.method for cell in self.results))

    @property
    def columns(self) -> list[str]:
        """What was measured with labels, known columns first."""
        found = dict.fromkeys(name for numbers in self.results.values() for name in numbers["columns"])
        return [*(name for name in SHARES if name in found), *(name for name in found if name not in SHARES)]

    def mean(self, method: str, column: str) -> tuple[float, float | None] | None:
        """Mean over seeds, and half the width of its 95 % interval."""
        found = [numbers["columns"].get(column) for numbers in self._of(method)]
        known = [value for value in found if value is not None]
        return interval(known) if known else None

    def quality(self, method: str) -> float | None:
        """The label-free quality, where it was measured: the mean over seeds."""
        # Every run measures the frozen backbone before it begins.
        frozen = method == "frozen"
        key, those = ("quality_before", self.results.values()) if frozen else ("quality_after", self._of(method))
        found = [numbers[key] for numbers in those if numbers.get(key) is not None]
        return sum(found) / len(found) if found else None

    def kept(self, method: str) -> tuple[int, int]:
        """In how many of its runs the gate kept what was learned, and how many there were."""
        judged = [numbers["kept"] for numbers in self._of(method) if numbers.get("kept") is not None]
        return sum(kept != "identity" for kept in judged), len(judged)

    def bytes(self, method: str) -> float:
        found = [float(numbers["bytes"]) for numbers in self._of(method)]
        return sum(found) / max(1, len(found))

    def seconds(self, method: str) -> float:
        found = [float(numbers["seconds"]) for numbers in self._of(method)]
        return sum(found) / max(1, len(found))

    def _of(self, method: str) -> list[Mapping[str, Any]]:
        return [numbers for cell, numbers in self.results.items() if cell.method == method]


def head(rivals: Rivals) -> list[str]:
    measured = [SHARES.get(name, name) for name in rivals.columns]
    return ["", *measured, "quality (without labels)", "kept", "bytes per task", "seconds"]


def rows(rivals: Rivals) -> list[list[str]]:
    """A row for each method; accuracy in percent, of other methods than the first with the difference to it."""
    return [
        [
            ROWS.get(method, method),
            *(_accuracy(rivals, method, column) for column in rivals.columns),
            _number(rivals.quality(method), ".3f"),
            "{} of {}".format(*rivals.kept(method)) if rivals.kept(method)[1] else "-",
            f"{rivals.bytes(method):,.0f}" if rivals.bytes(method) else "-",
            f"{rivals.seconds(method):.0f}",
        ]
        for method in rivals.methods
    ]


def markdown(rivals: Rivals) -> str:
    lines = [head(rivals), ["---"] * len(head(rivals)), *rows(rivals)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_dict(rivals: Rivals) -> dict[str, Any]:
    """All cells, and what they come to."""
    summary = [
        {
            "method": method,
            **{column: found[0] for column in rivals.columns if (found := rivals.mean(method, column)) is not None},
            "quality": rivals.quality(method),
            "kept": rivals.kept(method)[0],
            "judged": rivals.kept(method)[1],
            "bytes": rivals.bytes(method),
            "seconds": rivals.seconds(method),
        }
        for method in rivals.methods
    ]
    return {"summary": summary, "cells": {cell.name: dict(numbers) for cell, numbers in rivals.results.items()}}


def _accuracy(rivals: Rivals, method: str, column: str) -> str:
    found, first = rivals.mean(method, column), rivals.mean(rivals.methods[0], column)
    if found is None:
        return "-"
    mean, width = found
    text = f"{100 * mean:.1f}" + (f" ± {100 * width:.1f}" if width else "")
    if first is None or method == rivals.methods[0]:
        return text
    return f"{text} ({100 * (mean - first[0]):+.1f})"


def _number(value: float | None, digits: str) -> str:
    return "-" if value is None else f"{value:{digits}}"
