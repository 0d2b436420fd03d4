"""`evaluate`: how good the vectors are, on labelled images, in every variant."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from ..data import Images
from ..data.labels import check_left, matched
from ..data.seen import count_seen
from ..embedding.cache import FeatureCache, Vectors
from ..embedding.embedder import Embedder
from ..embedding.extraction import extract
from ..embedding.mapping import made_for
from ..embedding.vectors import Progress
from ..evaluation.feature_map import FeatureMap
from ..evaluation.measuring import Features
from ..files import RunFile
from ..running import best_device


def features_of(
    embedder: Embedder,
    train: Images,
    test: Images,
    *,
    divided: bool = True,
    batch_size: int = 64,
    cache: FeatureCache | None = None,
    progress: Progress | None = None,
) -> Features:
    """Features and labels of both parts; labels that cannot be measured with are refused before the work.

    Images that do not decode are left out. `divided` is only reported.
    """
    labels = matched(train, test)
    total = len(train) + len(test)

    def vectors(images: Images, before: int) -> dict[str, Vectors]:
        advance = None if progress is None else lambda done, _: progress(before + done, total)
        return extract(embedder, images, batch_size=batch_size, cache=cache, progress=advance)

    own, other = vectors(train, 0), vectors(test, len(train))
    kept, test_kept = next(iter(own.values())).kept, next(iter(other.values())).kept
    y, truth = torch.tensor(labels.train)[kept], torch.tensor(labels.test)[test_kept]
    check_left(set(y.tolist()), set(truth.tolist()), labels.classes)
    left_out = total - len(kept) - len(test_kept)
    head = None if embedder.head is None else embedder.head.to(best_device())
    return Features(
        _rows(own), y, _rows(other), truth, labels.classes, left_out, divided, embedder.variants.variants, head
    )


def maps_for(embedder: Embedder, path: Path) -> dict[str, FeatureMap]:
    """The map of a file, for those variants whose vectors it was fitted to; for none, it is refused."""
    found = FeatureMap.load(path)
    variants = [each for each in embedder.variants.variants if found.made_for in (None, made_for(embedder, each))]
    if not variants:
        found.check(made_for(embedder, embedder.variant), str(path))
    return dict.fromkeys(variants, found)


def seen_by(what: str | Path, test: Images) -> int | None:
    """How many of the test images the run was trained on, by content; None where nobody knows.

    what: as for `load_embedder`. Run folders say what was learned from; names and files elsewhere do not.
    """
    if not os.path.exists(what):  # noqa: PTH110  # Path.exists raises on names that no path can have
        return None
    path = Path(what)
    return count_seen((path if path.is_dir() else path.parent) / RunFile.SEEN, test)


def _rows(vectors: dict[str, Vectors]) -> dict[str, Tensor]:
    return {variant: each.rows.to(best_device()) for variant, each in vectors.items()}
