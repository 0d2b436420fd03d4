"""All kinds of files that vectors can be made with, and what opens them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .. import checked
from ..backbones import Backbone
from ..cascade.combination import CONDITIONAL
from ..cascade.file import FORMAT, open_cascade
from ..cascade.model import BATCH, Cascade
from ..data import Images
from ..data.partition import open_to_learn
from ..embedding.embedder import TRAINED, Embedder, PlainVariants
from ..embedding.loading import FileKind, MaskFile, NamedFile, load, ready
from ..errors import DataError
from ..files import RunFile
from ..preprocessing import of_file
from ..training.tuned import is_tuned, load_tuned, open_tuned


def load_embedder(
    what: str | Path,
    *,
    backbone: str | None = None,
    weights: Path | None = None,
    size: int | None = None,
    may_use: Callable[[str], bool] | None = None,
) -> Embedder:
    """The model that `what` stands for: a run folder, a file it holds (.smn, .safetensors), or a backbone's name.

    As for the rest, see `embedding.loading.load`.
    """
    return load(KINDS, what, backbone=backbone, weights=weights, size=size, may_use=may_use)


def images_of_run(what: str | Path) -> Images | None:
    """The images that a run was begun with, by its folder or a file in it; None where that, or they, are not there."""
    path = Path(what)
    try:
        content = checked.content((path if path.is_dir() else path.parent) / RunFile.CONFIG)
        config = checked.mapping(checked.document(content, finite=False))
        split = checked.optional(config.get("split"), checked.text)
        return open_to_learn(checked.text(config.get("images")), split="all" if split == "all" else "train").images
    except (OSError, ValueError, DataError):
        return None


class CascadeFile:
    """A cascade, on its base."""

    run_file = RunFile.CASCADE

    @staticmethod
    def open(file: NamedFile) -> CascadeFile | None:
        return CascadeFile(file) if file.format == FORMAT else None

    def __init__(self, file: NamedFile) -> None:
        self.path, self.cascade = file.path, open_cascade(file.container)
        self.base_name = self.cascade.about().manifest.base_name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.cascade.masks[0].shapes

    def on(self, backbone: Backbone, size: int | None) -> Embedder:
        cascade = Cascade.load(backbone.model, self.cascade, size=size)
        return Embedder(
            f"{backbone.name} + {self.path}",
            ready(cascade),
            cascade.preprocessing,
            cascade.width,
            variant=CONDITIONAL,
            batch_size=BATCH,
        )


class TunedFile:
    """What another method than a mask trained."""

    run_file = RunFile.TUNED

    @staticmethod
    def open(file: NamedFile) -> TunedFile | None:
        return TunedFile(file) if is_tuned(file.path) else None

    def __init__(self, file: NamedFile) -> None:
        # What cannot be opened is tried once more, for the error that belongs to files of this kind.
        self.path, self.tuned = file.path, open_tuned(file.container if file.opens else file.path)

    @property
    def base_name(self) -> str | None:
        return self.tuned.about.base_name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.tuned.shapes

    def on(self, backbone: Backbone, size: int | None) -> Embedder:
        preprocessing = of_file(self.tuned.about.preprocessing, backbone.preprocessing, size)
        model, head = load_tuned(backbone.model, self.tuned)
        variants = PlainVariants(model, TRAINED, "as trained")
        name = f"{backbone.name} + {self.path}"
        return Embedder(name, ready(model), preprocessing, backbone.width, head, variants)


# The last takes what nobody else knows, to say why it is none.
KINDS: tuple[FileKind, ...] = (
    CascadeFile,
    TunedFile,
    MaskFile,
)
