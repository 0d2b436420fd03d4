"""What a finished run leaves behind: the mask, numbers, and a report that shows what changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Images, ImageStore
from ..data.labels import matched
from ..embedding.vectors import embed
from ..evaluation import few_label_probe, knn_accuracy, nearest
from ..files import LogKey, RunFile
from ..masking import MaskedModel
from ..preprocessing import Preprocessing
from ..training import RunFolder
from ..training.beside import Beside

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


def write_mask(masked: MaskedModel, file: Path) -> dict[str, Any]:
    """Write the mask; what it came to."""
    return {
        "mask_bytes": masked.save_pretrained(file),
        "one_bit_bytes": -(-masked.num_masked // 8),
        "base_bytes": sum(4 * parameter.numel() for parameter in masked.base.parameters()),
        "active": masked.sparsity()["total"],
    }


def how_it_went(folder: RunFolder) -> dict[str, Any]:
    """The last loss, and what went wrong on the way."""
    return {
        "loss": folder.last_loss,
        "troubles": [
            {key.value: line[key] for key in (LogKey.STEP, LogKey.TROUBLE, LogKey.ANSWER)}
            for line in folder.read_log()
            if LogKey.TROUBLE in line
        ],
    }


def measure(model: Beside, preprocessing: Preprocessing, labelled: Labelled) -> dict[str, float]:
    """k-NN with all training labels, and a linear probe with 1 % of them, of the frozen backbone and as adapted."""
    numbers: dict[str, float] = {}
    labels = matched(labelled.train, labelled.test)
    train_before, train_after, kept = _both(model, labelled.train, preprocessing)
    test_before, test_after, test_kept = _both(model, labelled.test, preprocessing)
    y, truth = torch.tensor(labels.train)[kept], torch.tensor(labels.test)[test_kept]
    sides = {"before": (train_before, test_before), "after": (train_after, test_after)}
    for side, (bank, queries) in sides.items():
        numbers[f"knn_{side}"] = knn_accuracy(bank, y, queries, truth, k=min(200, len(bank)))
        numbers[f"probe_{side}"] = few_label_probe(bank, y, queries, truth, fraction=FEW_LABELS)[0]
    return numbers


class _Both(nn.Module):
    """The vectors of the frozen backbone and those as adapted, side by side."""

    def __init__(self, model: Beside) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return torch.cat([self.model.frozen(pixels), self.model(pixels)], 1)


def _both(model: Beside, images: Any, preprocessing: Preprocessing) -> tuple[Tensor, Tensor, list[int]]:
    rows, kept = embed(_Both(model), images, preprocessing)
    before, after = rows.chunk(2, 1)
    return before, after, kept


def write_neighbours_report(
    model: Beside, preprocessing: Preprocessing, store: ImageStore, folder: RunFolder, result: dict[str, Any]
) -> None:
    """The report of an adaptation: some images with their nearest neighbours, before and after."""
    from ..report.examples import Neighbours
    from ..report.page import ReportData, write_report  # here, because matplotlib takes its time

    # Once each: another image may stand in for one that could not be read.
    pool = _Part(store, sorted({store.place(i) for i in range(0, len(store), max(1, len(store) // _POOL))}))
    before, after, kept = _both(model, pool, preprocessing)
    queries = list(range(0, len(kept), max(1, len(kept) // _SHOWN)))[:_SHOWN]

    def images(rows: Tensor) -> list[list[Tensor]]:
        found = nearest(rows, rows[queries], min(_NEIGHBOURS + 1, len(rows)))
        # An image is its own nearest neighbour, unless another is just like it.
        others = [
            [i for i in line if i != own][:_NEIGHBOURS] for own, line in zip(queries, found.tolist(), strict=True)
        ]
        return [[pool[kept[i]] for i in line] for line in others]

    shown = Neighbours([pool[kept[i]] for i in queries], images(before), images(after))
    config = folder.read_json(folder.path / RunFile.CONFIG)
    shares = model.sparsity() if isinstance(model, MaskedModel) else {}
    shares.pop("total", None)
    title = f"{config.get('backbone') or 'A backbone'} adapted to {config.get('images') or 'images'}"
    data = ReportData(title, config, result, folder.read_log(), shares, shown, store.bad)
    write_report(folder.path / RunFile.REPORT, data)


class _Part:
    """Some images of a store."""

    def __init__(self, store: ImageStore, indices: Sequence[int]) -> None:
        self.store, self.indices = store, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Tensor:
        return self.store[self.indices[index]]
