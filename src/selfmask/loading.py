"""What turns images into vectors, by its name: a run folder, a mask file, or a backbone."""

from __future__ import annotations

import dataclasses
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from .backbones import Backbone, load_backbone
from .errors import EmbedderError, SelfmaskError, UnknownBackboneError
from .maskfile import Fingerprints, Preprocessing, inspect_mask_file
from .masking import MaskedModel

CONFIG, MASK = "config.json", "mask.smn"


@dataclasses.dataclass(frozen=True)
class Embedder:
    """A model in eval mode (a `MaskedModel`, or a plain one) with the preprocessing it expects."""

    name: str
    model: nn.Module
    preprocessing: Preprocessing
    width: int

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that the vectors depend on: weights, mask, batch-norm statistics and preprocessing."""
        how = json.dumps(dataclasses.asdict(self.preprocessing))
        if not isinstance(self.model, MaskedModel):
            return Fingerprints().of(self.model.state_dict()) + how
        mask = self.model.pack()
        norm = {f"norm.{name}": value for name, value in mask.norm.items()}
        return Fingerprints().of(self.model.base.state_dict() | norm) + mask.sha256 + how


def load_embedder(what: str | Path, *, backbone: str | None = None, weights: Path | None = None) -> Embedder:
    """The model that `what` stands for: a run folder, a mask file (.smn), or a backbone's name.

    `backbone` and `weights` say what to put the mask on where the run or the file does not, or says it wrongly.
    """
    path = Path(what)
    if path.is_dir():
        return _of_run(path, backbone, weights)
    if path.suffix == ".smn" or path.is_file():
        return _of_mask(path, backbone, weights)
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
    return Embedder(found.name, found.model.eval(), found.preprocessing, found.width)


def _of_run(folder: Path, name: str | None, weights: Path | None) -> Embedder:
    config = _read_config(folder)
    mask = folder / MASK
    if not mask.is_file():
        raise EmbedderError(
            f"the run in {folder} is not finished",
            expected=MASK,
            found="no such file in it",
            todo=f"finish it: selfmask adapt IMAGES --out {folder} --resume",
        )
    stored = config.get("weights")
    name, weights = name or config.get("backbone"), weights or (Path(stored) if stored else None)
    if not isinstance(name, str):
        raise EmbedderError(
            f"{folder / CONFIG} names no backbone", expected='"backbone": a name', todo="say it: --backbone NAME"
        )
    backbone = load_backbone(name, weights=weights)
    how, size = backbone.preprocessing, config.get("size")
    return _masked(mask, backbone, how if size is None else dataclasses.replace(how, size=(size, size)))


def _read_config(folder: Path) -> dict[str, Any]:
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
    return config


def _of_mask(file: Path, name: str | None, weights: Path | None) -> Embedder:
    manifest, _ = inspect_mask_file(file)
    if (name := name or manifest.base_name) is None:
        raise EmbedderError(
            f"{file} does not name the backbone it was learned on",
            todo="name it: --backbone NAME, with --weights FILE if its weights are your own",
        )
    try:
        backbone = load_backbone(name, weights=weights)
    except SelfmaskError as error:
        raise EmbedderError(
            f"the backbone of {file} cannot be loaded",
            expected=name,
            found=error.what,
            todo="name one on this machine: --backbone NAME, with --weights FILE if its weights are in a file",
        ) from error
    return _masked(file, backbone, manifest.preprocessing or backbone.preprocessing)


def _masked(file: Path, backbone: Backbone, preprocessing: Preprocessing) -> Embedder:
    model = MaskedModel.from_pretrained(backbone.model, file).eval()
    return Embedder(f"{backbone.name} + {file}", model, preprocessing, backbone.width)
