"""From what a user names to what turns images into vectors: a run folder, a file of a run, or a backbone's name."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

from torch import nn

from .. import checked
from ..backbones import Backbone, at_hand, load_backbone
from ..errors import EmbedderError, HeadError, MaskFileError, SelfmaskError, UnknownBackboneError
from ..files import RunFile
from ..maskfile import Container, OpenedMask, open_container
from ..masking import MaskedModel
from ..objectives.heads import Head, head_of
from ..preprocessing import of_file
from ..running import best_device
from .embedder import Embedder


class NamedFile:
    """A file that a user names, opened once, whatever kind it turns out to be of."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def container(self) -> Container:
        """Open, with its header read: that tells the kinds apart."""
        return open_container(self.path)

    @property
    def opens(self) -> bool:
        """Whether it is a container at all. What is wrong with it, whoever takes it says."""
        try:
            return bool(self.container.name)
        except MaskFileError:
            return False

    @property
    def format(self) -> str | None:
        """What the header says that it is."""
        return self.container.metadata.get("format") if self.opens else None

    def __enter__(self) -> NamedFile:
        return self

    def __exit__(self, *_: object) -> None:
        if "container" in self.__dict__:
            self.container.close()


class OpenedFile(Protocol):
    """A file of a run, checked as far as that is possible without its backbone."""

    @property
    def base_name(self) -> str | None:
        """The backbone that it names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensors that its backbone must have."""

    def on(self, backbone: Backbone, size: int | None) -> Embedder:
        """What it makes of its backbone, for images of a size, or of the one that it says."""


class FileKind(Protocol):
    """A kind of file that vectors can be made with."""

    run_file: RunFile
    """What it is called in a run folder."""

    def open(self, file: NamedFile) -> OpenedFile | None:
        """The file, read whole, or None if it is of another kind."""


MayUse = Callable[[str], bool]
"""Asks the user whether a backbone that only a file names may be downloaded or built."""


def load(
    kinds: Sequence[FileKind],
    what: str | Path,
    *,
    backbone: str | None = None,
    weights: Path | None = None,
    size: int | None = None,
    may_use: MayUse | None = None,
) -> Embedder:
    """The model that `what` stands for: a run folder, a file of one of these kinds, or a backbone's name.

    `backbone` and `weights` say what to put the mask on where the run or the file does not, or says it wrongly. A name
    that only the run or the file gives is followed where everything is on this machine (`backbones.at_hand`); else
    `may_use` is asked, and without it the name is refused. `size` is that of the images, where it is not to be the
    stored one, or is far larger than the backbone's own.
    """
    path = Path(what)
    if path.is_dir():
        return _of_run(kinds, path, backbone, weights, size, may_use)
    if path.suffix in {Path(kind.run_file).suffix for kind in kinds} or path.is_file():
        return _of_file(kinds, path, backbone, weights, size, may_use)
    if backbone is not None:
        raise EmbedderError(
            f"{what} is neither a run folder nor a mask file, so it cannot be used with {backbone}",
            todo="check the path; to use the backbone without a mask, give only its name",
        )
    try:
        found = load_backbone(str(what), weights=weights)
    except UnknownBackboneError as error:
        raise EmbedderError(
            f"{what} is not a run folder, a mask file or a backbone",
            expected=f"an existing folder or .smn file, or {error.expected}",
            todo="check the path, or list names with `selfmask backbones PATTERN`",
        ) from error
    preprocessing = of_file(found.preprocessing, found.preprocessing, size)
    return Embedder(found.name, ready(found.model), preprocessing, found.width)


def _of_run(
    kinds: Sequence[FileKind],
    folder: Path,
    name: str | None,
    weights: Path | None,
    size: int | None,
    may_use: MayUse | None,
) -> Embedder:
    own_name, own_weights = _backbone_of(folder)
    files = [folder / kind.run_file for kind in kinds]
    for file in files:
        if file.is_file():
            return _of_file(kinds, file, name, weights or own_weights, size, may_use, own_name)
    raise EmbedderError(
        f"the run in {folder} is not finished",
        expected=" or ".join(file.name for file in files),
        found="no such file in the folder",
        todo=f"finish it with the command that started it and --resume {folder}",
    )


def _backbone_of(folder: Path) -> tuple[str | None, Path | None]:
    """The name of the run's backbone and the file of its weights, as far as the run was told."""
    try:
        config = checked.mapping(checked.document(checked.content(folder / RunFile.CONFIG), finite=False))
        name, weights = (checked.optional(config.get(key), checked.text) for key in ("backbone", "weights"))
    except (OSError, ValueError) as error:
        raise EmbedderError(
            f"{folder} is not a run folder",
            expected=f"{RunFile.CONFIG}, which `selfmask adapt --out` writes",
            found=getattr(error, "strerror", None) or error,
            todo="give a run folder, a mask file (.smn) or the name of a backbone",
        ) from error
    return name, None if weights is None else Path(weights)


def _of_file(
    kinds: Sequence[FileKind],
    path: Path,
    asked_for: str | None,
    weights: Path | None,
    size: int | None,
    may_use: MayUse | None,
    of_run: str | None = None,
) -> Embedder:
    with NamedFile(path) as file:
        opened = next((opened for kind in kinds if (opened := kind.open(file)) is not None), None)
    if opened is None:
        raise EmbedderError(
            f"{path} cannot be used to make vectors",
            expected=", ".join(kind.run_file for kind in kinds),
            todo="give a run folder, a file from one, or the name of a backbone",
        )
    name = asked_for or of_run or opened.base_name
    if name is None:
        raise EmbedderError(
            f"{path} does not name the backbone it was learned on",
            todo="name it: --backbone NAME, with --weights FILE if its weights are your own",
        )
    try:
        if asked_for is None and not at_hand(name, weights) and not (may_use is not None and may_use(name)):
            raise EmbedderError(
                f"{path} names a backbone that would have to be downloaded, or built from other files",
                expected=f"your word that {name[:200]} may be used",
                found="only the name in the file",
                todo=f"if you trust it, name it yourself: --backbone {shlex.quote(name[:200])}",
            )
        backbone = load_backbone(name, weights=weights, shapes=opened.shapes)
    except (EmbedderError, MaskFileError):
        raise
    except SelfmaskError as error:
        raise EmbedderError(
            f"the backbone of {path} cannot be loaded",
            expected=name[:200],
            found=error.what,
            todo="give one that is on this machine: --backbone NAME, with --weights FILE if its weights are in a file",
        ) from error
    return opened.on(backbone, size)


def ready(model: nn.Module) -> nn.Module:
    return model.eval().to(best_device())


class MaskFile:
    """A mask, on its base."""

    run_file = RunFile.MASK

    @staticmethod
    def open(file: NamedFile) -> MaskFile | None:
        return MaskFile(file)

    def __init__(self, file: NamedFile) -> None:
        self.path = file.path
        self.mask = OpenedMask(file.container).checked()

    @property
    def base_name(self) -> str | None:
        return self.mask.manifest.base_name

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.mask.shapes

    def on(self, backbone: Backbone, size: int | None) -> Embedder:
        model = MaskedModel.from_pretrained(backbone.model, self.mask, size=size)
        try:
            head: Head | None = head_of(model.pack().head)
        except HeadError:  # none, or one that others made for themselves: vectors do without
            head = None
        preprocessing = model.preprocessing or backbone.preprocessing
        return Embedder(f"{backbone.name} + {self.path}", ready(model), preprocessing, backbone.width, head)
