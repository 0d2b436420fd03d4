"""The honest table: a row for each kind of vectors, with and without a map, and the same four measures for all.

Whitening frozen features takes no training and milliseconds: whoever adapts a backbone has to beat that, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from .knn import knn_accuracy
from .measuring import MAP, Features
from .probe import linear_probe

FEW, _SEEDS = 10, 3
COLUMNS = {
    "knn": "k-NN (k = 20)",
    "knn_200": "k-NN (k = 200)",
    "probe_few": f"probe ({FEW} labels a class)",
    "probe": "probe (all labels)",
}
"""The measures of a row, and what to call them; the first leads."""
Rows = Mapping[str, Mapping[str, float]]
"""Accuracy by variant and measure."""


def rows_of(features: Features) -> dict[str, dict[str, float]]:
    """The measures of every variant; `measuring.with_maps` adds those with a map."""
    y, truth = features.labels, features.truth
    few = [few_per_class(y.tolist(), seed) for seed in range(_SEEDS)]
    rows = {}
    for variant, train in features.train.items():
        test = features.test[variant]
        rows[variant] = {
            "knn": knn_accuracy(train, y, test, truth, k=min(20, len(train))),
            "knn_200": knn_accuracy(train, y, test, truth, k=min(200, len(train))),
            "probe_few": float(np.mean([linear_probe(train[some], y[some], test, truth) for some in few])),
            "probe": linear_probe(train, y, test, truth),
        }
    return rows


def few_per_class(labels: list[int], seed: int, count: int = FEW) -> list[int]:
    """Numbers of some images of each class, or of all that it has, chosen by the seed alone."""
    numbers = torch.tensor(labels)
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    chosen = [order[numbers[order] == label][:count] for label in sorted(set(labels))]
    return sorted(int(number) for own in chosen for number in own)


def title_of_row(variant: str) -> str:
    return f"{variant.removesuffix(MAP)} + map" if variant.endswith(MAP) else variant


def as_table(rows: Rows) -> list[list[str]]:
    """Head and lines, in words: accuracies in percent."""
    lines = [[title_of_row(name), *(f"{row[key]:.1%}" for key in COLUMNS)] for name, row in rows.items()]
    return [["", *COLUMNS.values()], *lines]
