"""What turns images into vectors, by its name: a run folder, a mask file, or a backbone."""

from __future__ import annotations

import dataclasses
import json
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from .backbones import Backbone, load_backbone
from .cascade import Cascade
from .cascade.file import inspect_cascade, is_cascade, read_cascade
from .errors import EmbedderError, HeadError, SelfmaskError, UnknownBackboneError
from .heads import Head, head_of
from .maskfile import Fingerprints, Preprocessing, inspect_mask_file
from .masking import MaskedModel
from .supervised.tuned import load_tuned, read_about

CONFIG, MASK, TUNED, CASCADE = "config.json", "mask.smn", "tuned.safetensors", "cascade.smn"


@dataclasses.dataclass(frozen=True)
class Embedder:
    """A model in eval mode, on the GPU if there is one, with its preprocessing.

    It is a `MaskedModel`, a `Cascade`, or a plain one.
    """

    name: str
    model: nn.Module
    preprocessing: Preprocessing
    width: int
    head: Head | None = None
    """What was trained with the mask, or the backbone, to tell classes."""
    is_tuned: bool = False
    """Whether the weights were trained: it is then no frozen backbone, and has no mask."""

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that the vectors depend on: weights, mask, batch-norm statistics and preprocessing."""
        how = json.dumps(dataclasses.asdict(self.preprocessing))
        if isinstance(self.model, Cascade):
            return self.model.fingerprint + self.model.combination + how
        if not isinstance(self.model, MaskedModel):
            return Fingerprints().of(self.model.state_dict()) + how
        mask = self.model.pack()
        norm = {f"norm.{name}": value for name, value in mask.norm.items()}
        return Fingerprints().of(self.model.base.state_dict() | norm) + mask.sha256 + how


def load_embedder(what: str | Path, *, backbone: str | None = None, weights: Path | None = None) -> Embedder:
    """The model that `what` stands for: a run folder, a file it holds (.smn, .safetensors), or a backbone's name.

    `backbone` and `weights` say what to put the mask on where the run or the file does not, or says it wrongly.
    """
    path = Path(what)
    if path.suffix == ".safetensors" and path.is_file():
        return _of_tuned(path, backbone, weights)
    if path.is_dir():
        return _of_run(path, backbone, weights)
    if path.suffix == ".smn" or path.is_file():
        return (_of_cascade if is_cascade(path) else _of_mask)(path, backbone, weights)
    if backbone is not None:
        raise EmbedderError(
            f"{what} is no run folder and no mask file to put on {backbone}",
            todo="check the path; to use the backbone without a mask, give its name alone",
        )
    try:
        found = load_backbone(str(what), weights=weights)
    except UnknownBackboneError as error:
        raise EmbedderError(
            f"{what} is no run folder, no mask file and no backbone",
            expected=f"an existing folder or .smn file, or {error.expected}",
            todo="check the path, or list names with `selfmask backbones PATTERN`",
        ) from error
    return Embedder(found.name, _ready(found.model), found.preprocessing, found.width)


def _of_run(folder: Path, name: str | None, weights: Path | None) -> Embedder:
    own_name, own_weights = _backbone_of(folder)
    mask = folder / MASK
    if (folder / CASCADE).is_file():
        return _of_cascade(folder / CASCADE, name or own_name, weights or own_weights)
    if (folder / TUNED).is_file():
        return _of_tuned(folder / TUNED, name or own_name, weights or own_weights)
    if not mask.is_file():
        raise EmbedderError(
            f"the run in {folder} is not finished",
            expected=f"{MASK} or {CASCADE}",
            found="no such file in it",
            todo=f"finish it: the command that began it, with --out {folder} (and --resume, if that is not `cascade`)",
        )
    return _of_mask(mask, name or own_name, weights or own_weights)


def _backbone_of(folder: Path) -> tuple[str | None, Path | None]:
    """The name of the run's backbone and the file of its weights, as far as the run was told."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise EmbedderError(
            f"{folder} is no run folder",
            expected=f"{CONFIG}, as `selfmask adapt --out` writes it",
            found=getattr(error, "strerror", None) or error,
            todo="give a run folder, a mask file (.smn) or the name of a backbone",
        ) from error
    if not isinstance(config, dict):
        raise EmbedderError(f"{folder / CONFIG} is no configuration", expected="a JSON object", found=type(config))
    name, weights = config.get("backbone"), config.get("weights")
    if not (isinstance(name, str | None) and isinstance(weights, str | None)):
        raise EmbedderError(f"{folder / CONFIG} names no backbone", expected="text", found=(name, weights))
    return name, None if weights is None else Path(weights)


def _of_mask(file: Path, name: str | None, weights: Path | None) -> Embedder:
    manifest, _ = inspect_mask_file(file)
    backbone = _load(file, name or _named(file, manifest.base_name), weights)
    model = MaskedModel.from_pretrained(backbone.model, file)
    how = manifest.preprocessing or backbone.preprocessing
    try:
        head: Head | None = head_of(model.pack().head)
    except HeadError:  # none, or one that others made for themselves: vectors do without
        head = None
    return Embedder(f"{backbone.name} + {file}", _ready(model), how, backbone.width, head)


def _of_cascade(file: Path, name: str | None, weights: Path | None) -> Embedder:
    backbone = _load(file, name or _named(file, inspect_cascade(file).manifest.base_name), weights)
    cascade = read_cascade(backbone.model, file)
    return Embedder(f"{backbone.name} + {file}", _ready(cascade), cascade.preprocessing, cascade.width)


def _named(file: Path, name: str | None) -> str:
    if name is None:
        raise EmbedderError(
            f"{file} does not name the backbone it was learned on",
            todo="name it: --backbone NAME, with --weights FILE if its weights are your own",
        )
    return name


def _of_tuned(file: Path, name: str | None, weights: Path | None) -> Embedder:
    about = read_about(file)
    backbone = _load(file, name or _named(file, about.base_name), weights)
    model, head = load_tuned(backbone.model, file)
    return Embedder(f"{backbone.name} + {file}", _ready(model), about.preprocessing, backbone.width, head, True)


def _load(file: Path, name: str, weights: Path | None) -> Backbone:
    try:
        return load_backbone(name, weights=weights)
    except SelfmaskError as error:
        raise EmbedderError(
            f"the backbone of {file} cannot be loaded",
            expected=name,
            found=error.what,
            todo="name one on this machine: --backbone NAME, with --weights FILE if its weights are in a file",
        ) from error


def _ready(model: nn.Module) -> nn.Module:
    return model.eval().to(best_device())


def best_device() -> torch.device:
    """The GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
