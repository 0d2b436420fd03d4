"""Files of what other methods than masks learn: one safetensors file with the tensors that changed, and the head."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import BadWeightsError, MaskFileError, RunWriteError, WrongBaseError
from ..files import RunFile, write_atomically
from ..maskfile import Container, Fingerprints, Source, open_container
from ..maskfile.container import container_bytes
from ..objectives.heads import Head, head_of
from ..preprocessing import Preprocessing
from .methods import Learner, add_lora

FORMAT = "selfmask-tuned"
_WEIGHT, _HEAD = "weight.", "head."


@dataclasses.dataclass(frozen=True)
class About:
    """What a file says of itself."""

    method: str
    base_name: str | None
    fingerprint: str
    """Of the backbone before training."""
    preprocessing: Preprocessing
    rank: int
    targets: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class OpenedTuned:
    """A file that was read, whole."""

    path: str
    about: About
    tensors: Mapping[str, Tensor]


def write_tuned(path: Path, learner: Learner, head: Head, about: About) -> int:
    """Write it atomically; return its size in bytes."""
    tensors = {_WEIGHT + name: value.detach().cpu().contiguous() for name, value in learner.kept().items()}
    tensors |= {_HEAD + name: value.contiguous() for name, value in head.tensors().items()}
    metadata = {"format": FORMAT, "about": json.dumps(dataclasses.asdict(about))}
    return write_atomically(path, container_bytes(tensors, metadata), RunWriteError)


def is_tuned(path: Path) -> bool:
    """Whether a file is to be read as one of these, by its name; not whether it is sound."""
    return path.suffix == Path(RunFile.TUNED).suffix


def open_tuned(source: Source | Container) -> OpenedTuned:
    """Read a file, once, and check what can be checked without its backbone."""
    try:
        with open_container(source) as file:
            about = _about(file)
            return OpenedTuned(file.name, about, file.read())
    except MaskFileError as error:
        raise BadWeightsError(
            error.what, expected="a file written by `selfmask train`", found=error.found, todo=error.todo
        ) from error


def load_tuned(model: nn.Module, file: Source | OpenedTuned) -> tuple[nn.Module, Head]:
    """The backbone with what was learned on it (changed in place), in eval mode, and the head."""
    opened = file if isinstance(file, OpenedTuned) else open_tuned(file)
    about, path = opened.about, opened.path
    weights, head = (
        {key.removeprefix(part): value for key, value in opened.tensors.items() if key.startswith(part)}
        for part in (_WEIGHT, _HEAD)
    )
    if (found := Fingerprints().of(model.state_dict())) != about.fingerprint:
        raise WrongBaseError(
            f"{path} was trained on another backbone",
            expected=f"{about.base_name or 'a backbone'}, fingerprint {about.fingerprint[:16]}",
            found=found[:16],
            todo="load the backbone it names, with the same weights: --backbone, --weights",
        )
    if about.method == "lora":
        add_lora(model, about.targets, about.rank)
    state = model.state_dict()
    if odd := [name for name, value in weights.items() if name not in state or state[name].shape != value.shape]:
        raise BadWeightsError(f"{path} does not fit its backbone", found=", ".join(odd[:3]))
    model.load_state_dict(weights, strict=False)
    return model.eval(), head_of(head)


def _about(file: Container) -> About:
    try:
        if file.metadata["format"] != FORMAT:
            raise ValueError(file.metadata["format"])
        fields = json.loads(file.metadata["about"])
        preprocessing: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in fields.pop("preprocessing").items()
        }
        return About(preprocessing=Preprocessing(**preprocessing), targets=tuple(fields.pop("targets")), **fields)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BadWeightsError(
            f"{file.name} is not a file of a trained backbone",
            expected="a file written by `selfmask train`",
            found=f"{type(error).__name__}: {error}",
        ) from error
