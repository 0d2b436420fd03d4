"""Collections for tests: bundled pictures under the bundled backbone and masks that differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selfmask.commands.index import index
from selfmask.data import Images, SomeImages, open_images
from selfmask.embedding.vectors import Progress
from selfmask.serving.building import Built, Settings
from selfmask.serving.collection import Collection

from .served import BACKBONE, save_mask

IMAGES = 60


def save_run(folder: Path, seed: int, off: float = 0.1) -> Path:
    """What of a run folder is needed to embed with it."""
    save_mask(folder / "mask.smn", seed, off)
    (folder / "config.json").write_text(json.dumps({"backbone": BACKBONE, "weights": None}))
    return folder


def clothes(count: int = IMAGES, start: int = 0) -> Images:
    return SomeImages(open_images("selfmask/fashion"), range(start, start + count))


@contextmanager
def silent(_: str) -> Iterator[Progress]:
    yield lambda done, total: None


def indexed(
    out: Path,
    *what: str | Path,
    images: Images | None = None,
    stage: Any = silent,
    say: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> Built:
    names = [str(each) for each in what]
    return index(names, images or clothes(), out, Settings(**settings), title="clothes", stage=stage, say=say)


@contextmanager
def opened(out: Path) -> Iterator[Collection]:
    with Collection.open(out) as collection:
        yield collection
