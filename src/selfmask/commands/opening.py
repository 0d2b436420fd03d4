"""All kinds of files that vectors can be made with, and what opens them."""

from __future__ import annotations

from pathlib import Path

from ..backbones import Backbone
from ..cascade import Cascade
from ..cascade.file import inspect_cascade, is_cascade
from ..cascade.model import BATCH, CONDITIONAL
from ..embedding.embedder import TRAINED, Embedder, PlainVariants
from ..embedding.loading import FileKind, MaskFile, load, ready
from ..files import RunFile
from ..training.tuned import is_tuned, load_tuned, read_about


def load_embedder(what: str | Path, *, backbone: str | None = None, weights: Path | None = None) -> Embedder:
    """The model that `what` stands for: a run folder, a file it holds (.smn, .safetensors), or a backbone's name.

    `backbone` and `weights` say what to put the mask on where the run or the file does not, or says it wrongly.
    """
    return load(KINDS, what, backbone=backbone, weights=weights)


class CascadeFile:
    """A cascade, on its base."""

    run_file = RunFile.CASCADE

    @staticmethod
    def open(path: Path) -> CascadeFile | None:
        return CascadeFile(path) if is_cascade(path) else None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.base_name = inspect_cascade(path).manifest.base_name

    def on(self, backbone: Backbone) -> Embedder:
        cascade = Cascade.load(backbone.model, self.path)
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
    def open(path: Path) -> TunedFile | None:
        return TunedFile(path) if is_tuned(path) else None

    def __init__(self, path: Path) -> None:
        self.path, self.about = path, read_about(path)

    @property
    def base_name(self) -> str | None:
        return self.about.base_name

    def on(self, backbone: Backbone) -> Embedder:
        model, head = load_tuned(backbone.model, self.path)
        variants = PlainVariants(model, TRAINED, "as trained")
        name = f"{backbone.name} + {self.path}"
        return Embedder(name, ready(model), self.about.preprocessing, backbone.width, head, variants)


# The last takes what nobody else knows, to say why it is none.
KINDS: tuple[FileKind, ...] = (
    CascadeFile,
    TunedFile,
    MaskFile,
)
