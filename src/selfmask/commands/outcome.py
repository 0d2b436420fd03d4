"""What a finished run leaves behind: the mask, numbers, and a report that shows what changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..data import Images, ImageStore
from ..data.labels import matched
from ..embedding.embedder import FROZEN, Embedder
from ..embedding.mapping import made_for
from ..embedding.vectors import embed
from ..errors import EvaluationError
from ..evaluation import nearest
from ..evaluation.feature_map import FeatureMap, sample
from ..evaluation.measuring import with_maps
from ..evaluation.rows import rows_of
from ..files import LogKey, RunFile
from ..masking import MaskedModel
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


def measure(embedder: Embedder, labelled: Labelled) -> dict[str, Any]:
    """k-NN and linear probes of the frozen backbone and as adapted, each with and without a map."""
    features = features_of(embedder, labelled.train, labelled.test)
    return {"rows": rows_of(with_maps(features))}


class _Part:
    """Some images of a store."""

    def __init__(self, store: ImageStore, indices: Sequence[int]) -> None:
        self.store, self.indices = store, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Tensor:
        return self.store[self.indices[index]]


class Sampled(NamedTuple):
    """Images of a run, and their vectors as adapted: what the map is fitted to, and neighbours are looked for in."""

    images: _Part
    vectors: Tensor


def sampled(embedder: Embedder, store: ImageStore) -> Sampled:
    # Once each: another image may stand in for one that could not be read.
    images = _Part(store, sorted({store.place(i) for i in sample(len(store))}))
    return Sampled(images, embed(embedder.module([embedder.variant]), images, embedder.preprocessing)[0])


def write_map(embedder: Embedder, found: Sampled, folder: RunFolder) -> int:
    """Write map.safetensors; return its size, or 0 if there can be none."""
    made = made_for(embedder, embedder.variant)
    try:
        return FeatureMap.fit(found.vectors, made_for=made).save(folder.path / RunFile.MAP)
    except EvaluationError:  # vectors that are too long for one, or no numbers
        return 0


def write_neighbours_report(embedder: Embedder, found: Sampled, folder: RunFolder, result: dict[str, Any]) -> None:
    """The report of an adaptation: some images with their nearest neighbours, before and after."""
    from ..report.examples import Neighbours
    from ..report.page import ReportData, write_report  # here, because matplotlib takes its time

    store, rows = found.images.store, range(0, len(found.images), max(1, len(found.images) // _POOL))
    pool, after = _Part(store, [found.images.indices[row] for row in rows]), found.vectors[list(rows)]
    before, _ = embed(embedder.module([FROZEN]), pool, embedder.preprocessing)
    queries = list(range(0, len(pool), max(1, len(pool) // _SHOWN)))[:_SHOWN]

    def images(rows: Tensor) -> list[list[Tensor]]:
        near = nearest(rows, rows[queries], min(_NEIGHBOURS + 1, len(rows)))
        # An image is its own nearest neighbour, unless another is just like it.
        others = [[i for i in line if i != own][:_NEIGHBOURS] for own, line in zip(queries, near.tolist(), strict=True)]
        return [[pool[i] for i in line] for line in others]

    shown = Neighbours([pool[i] for i in queries], images(before), images(after))
    config = folder.read_json(folder.path / RunFile.CONFIG)
    shares = embedder.model.sparsity() if isinstance(embedder.model, MaskedModel) else {}
    shares.pop("total", None)
    title = f"{config.get('backbone') or 'A backbone'} adapted to {config.get('images') or 'images'}"
    data = ReportData(title, config, result, folder.read_log(), shares, shown, store.bad)
    write_report(folder.path / RunFile.REPORT, data)
