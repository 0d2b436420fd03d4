"""What a finished run leaves behind: the mask, numbers, and a report that shows what changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..data import Images, ImageStore
from ..data.labels import matched
from ..embedding.embedder import FROZEN, MASK, Embedder
from ..embedding.mapping import fit_on
from ..embedding.vectors import embed
from ..errors import EvaluationError
from ..evaluation import nearest
from ..evaluation.feature_map import sample
from ..evaluation.measuring import with_maps
from ..evaluation.rows import rows_of
from ..files import LogKey, RunFile
from ..masking import MaskedModel
from ..preprocessing import Preprocessing
from ..training import RunFolder
from .evaluate import features_of

_SHOWN, _NEIGHBOURS, _POOL = 8, 6, 2000  # example images, neighbours of each, and images they are looked for in


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Labelled images to measure with, before and after; they are never trained on."""

    train: Images
    test: Images


def check_labels(labelled: Labelled | None) -> None:
    """Refuse labels that could not be measured with, before the run."""
    if labelled is not None:
        matched(labelled.train, labelled.test)


def write_mask(masked: MaskedModel, folder: RunFolder) -> dict[str, Any]:
    """Write mask.smn; what it came to, and how the loop went."""
    log = folder.read_log()
    return {
        "mask_bytes": masked.save_pretrained(folder.path / RunFile.MASK),
        "one_bit_bytes": -(-masked.num_masked // 8),
        "base_bytes": sum(4 * parameter.numel() for parameter in masked.base.parameters()),
        "active": masked.sparsity()["total"],
        "loss": folder.last_loss,
        "troubles": [
            {key.value: line[key] for key in (LogKey.STEP, LogKey.TROUBLE, LogKey.ANSWER)}
            for line in log
            if LogKey.TROUBLE in line
        ],
    }


def measure(masked: MaskedModel, preprocessing: Preprocessing, labelled: Labelled) -> dict[str, Any]:
    """k-NN and linear probes of the frozen backbone and the mask, each with and without a map."""
    features = features_of(Embedder("", masked, preprocessing, 0), labelled.train, labelled.test)
    return {"rows": rows_of(with_maps(features))}


def write_map(masked: MaskedModel, preprocessing: Preprocessing, store: ImageStore, folder: RunFolder) -> int:
    """Write map.safetensors, fitted on images of the run with the mask; return its size, or 0 if there can be none."""
    numbers = sorted({store.place(i) for i in sample(len(store))})
    try:
        found = fit_on(Embedder("", masked, preprocessing, 0), _Part(store, numbers))
    except EvaluationError:  # vectors that are too long, or no numbers
        return 0
    return found.save(folder.path / RunFile.MAP)


def _both(masked: MaskedModel, images: Any, preprocessing: Preprocessing) -> tuple[Tensor, Tensor, list[int]]:
    both = Embedder("", masked, preprocessing, 0).module([FROZEN, MASK])
    rows, kept = embed(both, images, preprocessing)
    before, after = rows.chunk(2, 1)
    return before, after, kept


def write_neighbours_report(
    masked: MaskedModel, preprocessing: Preprocessing, store: ImageStore, folder: RunFolder, result: dict[str, Any]
) -> None:
    """The report of an adaptation: some images with their nearest neighbours, before and after."""
    from ..report.examples import Neighbours
    from ..report.page import ReportData, write_report  # here, because matplotlib takes its time

    # Once each: another image may stand in for one that could not be read.
    pool = _Part(store, sorted({store.place(i) for i in range(0, len(store), max(1, len(store) // _POOL))}))
    before, after, kept = _both(masked, pool, preprocessing)
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
    shares = masked.sparsity()
    shares.pop("total")
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
