"""Methods that learned without labels, side by side: a row for each, and a column for everything that was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..evaluation.measuring import MAP
from ..evaluation.metrics import interval
from ..evaluation.rows import COLUMNS

ROWS = {
    "frozen": "frozen backbone",
    "adabn": "batch-norm statistics (AdaBN)",
    "mask": "mask",
    "full": "full fine-tuning",
    "lora": "LoRA",
    "bitfit": "BitFit",
}
"""What to call a method; one that is not here has its own name."""


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
    """The finished cells: `results[cell]` has `rows` (what was measured with labels, as it is and with a map: see
    `evaluation.rows`), `bytes`, `map_bytes` and `seconds`; where there was a gate, `quality_before`, `quality_after`
    and `kept`, too. Rows go by the method, those with a map by its name and `MAP`."""

    results: Mapping[RivalCell, Mapping[str, Any]]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(cell.method for cell in self.results))

    @property
    def rows(self) -> list[str]:
        """Each method, and after it the same with a map, if that was measured."""
        measured = {name for numbers in self.results.values() for name in numbers["rows"]}
        return [name for method in self.methods for name in (method, method + MAP) if name in {method, *measured}]

    @property
    def columns(self) -> list[str]:
        """What was measured with labels."""
        found = {key for numbers in self.results.values() for row in numbers["rows"].values() for key in row}
        return [key for key in COLUMNS if key in found]

    def mean(self, row: str, column: str) -> tuple[float, float | None] | None:
        """Mean over seeds, and half the width of its 95 % interval."""
        found = [numbers["rows"].get(row, {}).get(column) for numbers in self._of(row)]
        known = [value for value in found if value is not None]
        return interval(known) if known else None

    def quality(self, row: str) -> float | None:
        """The label-free quality, where it was measured: the mean over seeds. It is that of vectors without a map."""
        if row.endswith(MAP):
            return None
        # Every run measures the frozen backbone before it begins.
        frozen = row == "frozen"
        key, those = ("quality_before", self.results.values()) if frozen else ("quality_after", self._of(row))
        found = [numbers[key] for numbers in those if numbers.get(key) is not None]
        return sum(found) / len(found) if found else None

    def kept(self, row: str) -> tuple[int, int]:
        """In how many of its runs the gate kept what was learned, and how many there were."""
        judged = [numbers["kept"] for numbers in self._of(row) if numbers.get("kept") is not None]
        return sum(kept != "identity" for kept in judged), len(judged)

    def bytes(self, row: str) -> float:
        """What one task takes on a disk: the mean over seeds; with the map, if the row has one."""
        sizes = ("bytes", "map_bytes") if row.endswith(MAP) else ("bytes",)
        return self._mean_of([float(sum(numbers[size] for size in sizes)) for numbers in self._of(row)])

    def seconds(self, row: str) -> float:
        return self._mean_of([float(numbers["seconds"]) for numbers in self._of(row)])

    @staticmethod
    def _mean_of(found: list[float]) -> float:
        return sum(found) / max(1, len(found))

    def _of(self, row: str) -> list[Mapping[str, Any]]:
        method = row.removesuffix(MAP)
        return [numbers for cell, numbers in self.results.items() if cell.method == method]


def head(rivals: Rivals) -> list[str]:
    measured = [COLUMNS[name] for name in rivals.columns]
    return ["", *measured, "quality (without labels)", "kept", "bytes per task", "seconds"]


def rows(rivals: Rivals) -> list[list[str]]:
    """A line for each row; accuracy in percent, of others than the first with the difference to it."""
    return [
        [
            title_of(row),
            *(_accuracy(rivals, row, column) for column in rivals.columns),
            _number(rivals.quality(row), ".3f"),
            "{} of {}".format(*rivals.kept(row)) if rivals.kept(row)[1] else "-",
            f"{rivals.bytes(row):,.0f}" if rivals.bytes(row) else "-",
            f"{rivals.seconds(row):.0f}",
        ]
        for row in rivals.rows
    ]


def title_of(row: str) -> str:
    method = row.removesuffix(MAP)
    return ROWS.get(method, method) + (" + map" if row.endswith(MAP) else "")


def markdown(rivals: Rivals) -> str:
    lines = [head(rivals), ["---"] * len(head(rivals)), *rows(rivals)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_dict(rivals: Rivals) -> dict[str, Any]:
    """All cells, and what they come to."""
    summary = [
        {
            "method": row,
            **{column: found[0] for column in rivals.columns if (found := rivals.mean(row, column)) is not None},
            "quality": rivals.quality(row),
            "kept": rivals.kept(row)[0],
            "judged": rivals.kept(row)[1],
            "bytes": rivals.bytes(row),
            "seconds": rivals.seconds(row),
        }
        for row in rivals.rows
    ]
    return {"summary": summary, "cells": {cell.name: dict(numbers) for cell, numbers in rivals.results.items()}}


def _accuracy(rivals: Rivals, row: str, column: str) -> str:
    found, first = rivals.mean(row, column), rivals.mean(rivals.rows[0], column)
    if found is None:
        return "-"
    mean, width = found
    text = f"{100 * mean:.1f}" + (f" ± {100 * width:.1f}" if width else "")
    if first is None or row == rivals.rows[0]:
        return text
    return f"{text} ({100 * (mean - first[0]):+.1f})"


def _number(value: float | None, digits: str) -> str:
    return "-" if value is None else f"{value:{digits}}"
