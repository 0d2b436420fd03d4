"""`index`: a collection of images, to be searched by the frozen backbone and by masks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import checked
from ..data import Images
from ..embedding.mapping import load_map
from ..errors import ConfigError
from ..evaluation.feature_map import FeatureMap
from ..files import RunFile
from ..serving.building import Built, Settings, Stage, build_collection
from ..serving.spaces import Source
from .opening import KINDS, load_embedder

_RUN_FILES = [str(kind.run_file) for kind in KINDS]
_TUNED = Path(RunFile.TUNED).suffix


def index(
    what: Sequence[str],
    images: Images,
    out: Path,
    settings: Settings,
    *,
    title: str,
    backbone: str | None = None,
    weights: Path | None = None,
    size: int | None = None,
    may_use: Callable[[str], bool] | None = None,
    stage: Stage,
    say: Callable[[str], None],
) -> Built:
    """Index images under the frozen backbone and under each of `what`: run folders, files, or a backbone's name.

    Of the runs, what is needed to embed queries later is kept in the collection.
    """
    if not what:
        raise ConfigError("nothing to index with", expected="a run folder, a mask file or the name of a backbone")
    sources = [_source(each, settings, backbone, weights, size, may_use) for each in what]
    alone = next((each for each, source in zip(what, sources, strict=True) if source.is_frozen), None)
    loading = {"backbone": alone, "weights": None if weights is None else str(weights.resolve()), "size": size}
    return build_collection(out, sources, images, settings, title=title, stage=stage, say=say, loading=loading)


def _source(
    what: str,
    settings: Settings,
    backbone: str | None,
    weights: Path | None,
    size: int | None,
    may_use: Callable[[str], bool] | None,
) -> Source:
    if not os.path.exists(what):  # noqa: PTH110  # Path.exists raises on names that no path can have
        return Source(what, load_embedder(what, weights=weights, size=size, may_use=may_use))
    embedder = load_embedder(what, backbone=backbone, weights=weights, size=size, may_use=may_use)
    path = Path(what)
    folder, file = (path, _file_of(path)) if path.is_dir() else (path.parent, path)
    whiten: FeatureMap | None = None
    if settings.maps and (folder / RunFile.MAP).is_file() and file.name in _RUN_FILES:
        whiten = load_map(folder / RunFile.MAP, embedder)
    # Which kind a file is of, its content says; the name only says where a run folder has it.
    kept = file.name if file.name in _RUN_FILES else RunFile.TUNED if file.suffix == _TUNED else RunFile.MASK
    name = path.stem if file is path and file.name not in _RUN_FILES else folder.resolve().name
    return Source(name, embedder, whiten, {RunFile.CONFIG: _config(path, backbone, weights), kept: file})


def _file_of(run: Path) -> Path:
    """The file in a run folder that its vectors were made with."""
    return next(run / kind.run_file for kind in KINDS if (run / kind.run_file).is_file())


def _config(path: Path, backbone: str | None, weights: Path | None) -> bytes:
    """What of a run's settings says how to load it again: the name of its backbone, and the file of its weights."""
    known: dict[str, Any] = {}
    if path.is_dir():
        known = checked.mapping(checked.document(checked.content(path / RunFile.CONFIG), finite=False))
    named = known.get("weights") if weights is None else str(weights)
    place = None if named is None else str(Path(named).resolve())
    return json.dumps({"backbone": backbone or known.get("backbone"), "weights": place}).encode()
