"""Maps of an embedder's vectors: fitted in a pass over some images, kept in a file, and used after the model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from ..data import Images
from ..data.sources import SomeImages
from ..errors import FeatureMapError
from ..evaluation.feature_map import FeatureMap, MadeFor, power_named, sample
from ..files import RunFile
from .embedder import Embedder
from .vectors import Progress, embed_batches


def fit_map(
    embedder: Embedder, images: Images, *, batch_size: int = 64, progress: Progress | None = None
) -> FeatureMap:
    """A map of the embedder's vectors, fitted on a fixed sample of the images; memory does not grow with these."""
    some = SomeImages(images, sample(len(images)))
    model = embedder.module([embedder.variant])

    def vectors() -> Iterator[Tensor]:
        done = 0
        for batch in embed_batches(model, some, embedder.preprocessing, batch_size=batch_size):
            done += len(batch.indices) + len(batch.bad)
            if progress is not None:
                progress(done, len(some))
            yield batch.features

    return FeatureMap.fit(vectors(), made_for=made_for(embedder, embedder.variant))


def made_for(embedder: Embedder, variant: str) -> MadeFor:
    """What a map of these vectors is fitted for. Not the device: a map of a GPU's vectors is good on a CPU."""
    return MadeFor(embedder.variants.fingerprint(variant), embedder.preprocessing)


def load_map(path: Path, embedder: Embedder) -> FeatureMap:
    """The map of a file, if it was fitted to the vectors of this embedder."""
    return FeatureMap.load(path).check(made_for(embedder, embedder.variant), str(path))


def map_of_run(what: str | Path) -> Path:
    """The file of the map that a run left beside its mask; what: as for `load_embedder`."""
    path = Path(what)
    there = os.path.exists(what)  # noqa: PTH110  # Path.exists raises on names that no path can have
    file = (path if path.is_dir() else path.parent) / RunFile.MAP if there else None
    if file is None or not file.is_file():
        raise FeatureMapError(
            f"{what} has no map to whiten with",
            expected=f"{RunFile.MAP} in a run folder" if there else "a run folder, or a file with a map",
            todo="give a file: --map FILE (if it does not exist, a map is fitted to these images and written to it)",
        )
    return file


def whitened(embedder: Embedder, what: str | Path, power: str = "auto", map_file: Path | None = None) -> Embedder:
    """The embedder with its vectors going through the map of a run, or of a file; power: as a user writes it."""
    chosen = power_named(power)
    found = load_map(map_file or map_of_run(what), embedder)
    return with_map(embedder, found if chosen is None else found.at(chosen))


def with_map(embedder: Embedder, whiten: FeatureMap) -> Embedder:
    """The embedder with its vectors going through a map."""
    return dataclasses.replace(embedder, map=whiten)
