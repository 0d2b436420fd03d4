"""What a finished run leaves behind: the mask, numbers, and a report that shows what changed."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .data import Images, ImageStore
from .embedding import embed
from .evaluation import few_label_probe, knn_accuracy, nearest
from .evaluation.extraction import BothVectors
from .evaluation.labels import matched
from .maskfile import Preprocessing
from .masking import MaskedModel
from .training import RunFolder

_SHOWN, _NEIGHBOURS, _POOL = 8, 6, 2000  # example images, neighbours of each, and images they are looked for in
FEW_LABELS = 0.01


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Labelled images to measure with, before and after; they are never trained on."""

    train: Images
    test: Images


def check_labels(labelled: Labelled | None) -> None:
    """Refuse labels that could not be measured with, before the run."""
    if labelled is not None:
        matched(labelled.train, labelled.test)


def finish(
    masked: MaskedModel,
    how: Preprocessing,
    store: ImageStore,
    folder: RunFolder,
    numbers: dict[str, Any],
    labelled: Labelled | None,
    outside: float,
    with_report: bool,
) -> dict[str, Any]:
    """Write mask.smn, report.html and, last, result.json: where that is, the run is finished.

    outside: on the clock, when this process would have started if it had spent no time in the loop; what the log says
    of that comes on top, earlier processes of the run included.
    """
    log = folder.read_log()
    if store.bad:
        folder.write_json("bad_images.json", dict(store.bad))
    result = {
        "mask_bytes": masked.save_pretrained(folder.path / "mask.smn"),
        "one_bit_bytes": -(-masked.num_masked // 8),
        "base_bytes": sum(4 * parameter.numel() for parameter in masked.base.parameters()),
        "active": masked.sparsity()["total"],
        **{"loss": loss if math.isfinite(loss := log[-1]["loss"]) else None, "bad_images": len(store.bad)},
        "troubles": [{key: line[key] for key in ("step", "trouble", "answer")} for line in log if "trouble" in line],
        **numbers,
    }
    if labelled is not None:
        result |= measure(masked, how, labelled)
    result["seconds"] = sum(line["seconds"] for line in log) + time.perf_counter() - outside
    if with_report:
        write_report(folder.path / "report.html", masked, how, store, folder, result)
    folder.write_json("result.json", result)
    return result


def measure(masked: MaskedModel, how: Preprocessing, labelled: Labelled) -> dict[str, float]:
    """k-NN with all training labels, and a linear probe with 1 % of them, with the frozen backbone and the mask."""
    numbers: dict[str, float] = {}
    labels = matched(labelled.train, labelled.test)
    train_before, train_after, kept = _both(masked, labelled.train, how)
    test_before, test_after, test_kept = _both(masked, labelled.test, how)
    y, truth = torch.tensor(labels.train)[kept], torch.tensor(labels.test)[test_kept]
    sides = {"before": (train_before, test_before), "after": (train_after, test_after)}
    for side, (bank, queries) in sides.items():
        numbers[f"knn_{side}"] = knn_accuracy(bank, y, queries, truth, k=min(200, len(bank)))
        numbers[f"probe_{side}"] = few_label_probe(bank, y, queries, truth, fraction=FEW_LABELS)[0]
    return numbers


def _both(masked: MaskedModel, images: Any, how: Preprocessing) -> tuple[Tensor, Tensor, list[int]]:
    rows, kept = embed(BothVectors(masked), images, how)
    before, after = rows.chunk(2, 1)
    return before, after, kept


def write_report(
    path: Path, masked: MaskedModel, how: Preprocessing, store: ImageStore, folder: RunFolder, result: dict[str, Any]
) -> None:
    from .report import Neighbours, ReportData  # here, because matplotlib takes its time
    from .report import write_report as write

    # Once each: another image may stand in for one that could not be read.
    pool = _Part(store, sorted({store.place(i) for i in range(0, len(store), max(1, len(store) // _POOL))}))
    before, after, kept = _both(masked, pool, how)
    queries = list(range(0, len(kept), max(1, len(kept) // _SHOWN)))[:_SHOWN]

    def images(rows: Tensor) -> list[list[Tensor]]:
        found = nearest(rows, rows[queries], min(_NEIGHBOURS + 1, len(rows)))
        # An image is its own nearest neighbour, unless another is just like it.
        others = [
            [i for i in line if i != own][:_NEIGHBOURS] for own, line in zip(queries, found.tolist(), strict=True)
        ]
        return [[pool[kept[i]] for i in line] for line in others]

    shown = Neighbours([pool[kept[i]] for i in queries], images(before), images(after))
    config = json.loads((folder.path / "config.json").read_text())
    shares = masked.sparsity()
    shares.pop("total")
    title = f"{config.get('backbone') or 'A backbone'} adapted to {config.get('images') or 'images'}"
    write(path, ReportData(title, config, result, folder.read_log(), shares, shown, store.bad))


class _Part:
    """Some images of a store."""

    def __init__(self, store: ImageStore, indices: Sequence[int]) -> None:
        self.store, self.indices = store, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Tensor:
        return self.store[self.indices[index]]
