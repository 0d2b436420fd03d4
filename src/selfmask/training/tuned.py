"""Files of what other methods than masks learn: one safetensors file with the tensors that changed, and the head."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import nn

from ..errors import BadWeightsError, RunWriteError, WrongBaseError
from ..files import RunFile, write_atomically
from ..maskfile import Fingerprints
from ..maskfile.writer import in_one_order
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


def write_tuned(path: Path, learner: Learner, head: Head, about: About) -> int:
    """Write it atomically; return its size in bytes."""
    tensors = {_WEIGHT + name: value.detach().cpu().contiguous() for name, value in learner.kept().items()}
    tensors |= {_HEAD + name: value.contiguous() for name, value in head.tensors().items()}
    metadata = {"format": FORMAT, "about": json.dumps(dataclasses.asdict(about))}
    return write_atomically(path, in_one_order(save(tensors, metadata)), RunWriteError)


def is_tuned(path: Path) -> bool:
    """Whether a file is to be read as one of these, by its name; not whether it is sound."""
    return path.suffix == Path(RunFile.TUNED).suffix


def read_about(path: Path) -> About:
    with _opened(path) as file:
        return _about(path, file)


def load_tuned(model: nn.Module, path: Path) -> tuple[nn.Module, Head]:
    """The backbone with what was learned on it (changed in place), in eval mode, and the head."""
    with _opened(path) as file:
        about = _about(path, file)
        names = list(file.keys())
        weights = {name.removeprefix(_WEIGHT): file.get_tensor(name) for name in names if name.startswith(_WEIGHT)}
        head = head_of({name.removeprefix(_HEAD): file.get_tensor(name) for name in names if name.startswith(_HEAD)})
    if (found := Fingerprints().of(model.state_dict())) != about.fingerprint:
        raise WrongBaseError(
            f"{path} was learned on another backbone",
            expected=f"{about.base_name or 'a backbone'}, fingerprint {about.fingerprint[:16]}",
            found=found[:16],
            todo="load the backbone it names, with the weights it had: --backbone, --weights",
        )
    if about.method == "lora":
        add_lora(model, about.targets, about.rank)
    state = model.state_dict()
    if odd := [name for name, value in weights.items() if name not in state or state[name].shape != value.shape]:
        raise BadWeightsError(f"{path} does not fit its backbone", found=", ".join(odd[:3]))
    model.load_state_dict(weights, strict=False)
    return model.eval(), head


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except Exception as error:  # safetensors raises an error of its own, and those of the system
        raise BadWeightsError(
            f"{path} cannot be read", expected="a file that `selfmask train` wrote", found=error
        ) from error


def _about(path: Path, file: Any) -> About:
    metadata = file.metadata() or {}
    try:
        if metadata["format"] != FORMAT:
            raise ValueError(metadata["format"])
        fields = json.loads(metadata["about"])
        how: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in fields.pop("preprocessing").items()
        }
        return About(preprocessing=Preprocessing(**how), targets=tuple(fields.pop("targets")), **fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadWeightsError(
            f"{path} is no file of a trained backbone",
            expected="a file that `selfmask train` wrote",
            found=f"{type(error).__name__}: {error}",
        ) from error
