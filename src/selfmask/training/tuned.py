"""Files of what other methods than masks learn: one safetensors file with the tensors that changed, and the head."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from torch import Tensor, nn

from .. import checked
from ..errors import BadWeightsError, BaseWarning, MaskFileError, RunWriteError, UnsupportedVersionError, WrongBaseError
from ..files import RunFile, write_atomically
from ..maskfile import Container, Extension, Fingerprints, Source, open_container, state_of
from ..maskfile.container import container_bytes
from ..maskfile.extensions import owner, parse_extensions
from ..maskfile.manifest import VERSION, check_version, hashed_words
from ..objectives.heads import Head, head_of
from ..preprocessing import Preprocessing
from .methods import Learner, MethodName, add_lora

FORMAT = "selfmask-tuned"
"""Its version is that of mask files; the first had none, and no hash."""
FROZEN = "frozen"
"""In place of a method: nothing better than the backbone was found, and the file changes nothing in it."""
_WEIGHT, _HEAD = "weight.", "head."
_MAX_TARGETS, _MAX_RANK = 10_000, 1 << 16


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
    extensions: dict[str, Extension] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class OpenedTuned:
    """A file that was read, whole."""

    path: str
    about: About
    tensors: Mapping[str, Tensor]
    version: str

    @property
    def weights(self) -> dict[str, Tensor]:
        """What was learned of the backbone, by the names that it has there."""
        return {key.removeprefix(_WEIGHT): value for key, value in self.tensors.items() if key.startswith(_WEIGHT)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters of the backbone that the file changes, as far as they are its own."""
        return {name: tuple(value.shape) for name, value in self.weights.items() if ".lora_" not in name}


def write_tuned(path: Path, learner: Learner, head: Head | None, about: About) -> int:
    """Write it atomically; return its size in bytes. Without labels, there is no head."""
    tensors = {_WEIGHT + name: value.detach().cpu().contiguous() for name, value in learner.kept().items()}
    tensors |= {_HEAD + name: value.contiguous() for name, value in (head.tensors() if head else {}).items()}
    words = json.dumps(dataclasses.asdict(about), allow_nan=False)
    metadata = {"format": FORMAT, "version": VERSION, "about": words}
    data = container_bytes(tensors, metadata, hashed=hashed_words(FORMAT, VERSION, words))
    return write_atomically(path, data, RunWriteError)


def is_tuned(path: Path) -> bool:
    """Whether a file is to be read as one of these, by its name; not whether it is sound."""
    return path.suffix == Path(RunFile.TUNED).suffix


def open_tuned(source: Source | Container) -> OpenedTuned:
    """Read a file, once, and check what can be checked without its backbone."""
    try:
        with open_container(source) as file:
            version = file.metadata.get("version", "1")
            about = _about(file, version)
            odd = [
                key for key in file.table if not key.startswith((_WEIGHT, _HEAD)) and owner(key) not in about.extensions
            ]
            if odd:
                raise BadWeightsError(f"{file.name} contains tensors that do not belong in it", found=odd[0][:200])
            words = None if version == "1" else hashed_words(FORMAT, version, file.metadata["about"])
            return OpenedTuned(file.name, about, file.read(words), version)
    except MaskFileError as error:
        raise BadWeightsError(
            error.what, expected="a file written by `selfmask train`", found=error.found, todo=error.todo
        ) from error


def load_tuned(model: nn.Module, file: Source | OpenedTuned) -> tuple[nn.Module, Head | None]:
    """The backbone with what was learned on it (changed in place), in eval mode, and the head, if there is one."""
    opened = file if isinstance(file, OpenedTuned) else open_tuned(file)
    about, path = opened.about, opened.path
    weights = opened.weights
    head = {key.removeprefix(_HEAD): value for key, value in opened.tensors.items() if key.startswith(_HEAD)}
    _check_base(model, opened)
    if about.method == "lora":
        _check_lora(model, about, weights, path)  # before any memory is asked for
        add_lora(model, about.targets, about.rank)
    state = model.state_dict()
    if odd := [name for name, value in weights.items() if name not in state or state[name].shape != value.shape]:
        raise BadWeightsError(f"{path} does not fit its backbone", found=", ".join(odd[:3])[:200])
    if odd := [name for name, value in weights.items() if not bool(value.isfinite().all())]:
        raise BadWeightsError(f"{path} contains weights that are not finite", found=", ".join(odd[:3])[:200])
    model.load_state_dict(weights, strict=False)
    return model.eval(), head_of(head) if head else None


def _check_base(model: nn.Module, opened: OpenedTuned) -> None:
    old = opened.version == "1"
    found = Fingerprints().of(model.state_dict() if old else state_of(model).stored)
    if found != opened.about.fingerprint:
        raise WrongBaseError(
            f"{opened.path} was trained on another backbone",
            expected=f"{opened.about.base_name or 'a backbone'}, fingerprint {opened.about.fingerprint[:16]}",
            found=found[:16],
            todo="load the backbone it names, with the same weights: --backbone, --weights",
        )
    if old:
        warnings.warn(
            f"{opened.path} is from an earlier release and carries no hash: whether its weights were altered could not "
            "be checked",
            BaseWarning,
            stacklevel=3,
        )


def _check_lora(model: nn.Module, about: About, weights: Mapping[str, Tensor], path: str) -> None:
    """That the low-rank matrices the file calls for are those that it holds, beside layers that have room for them.

    Their sizes are then those of the file, however large a rank it names.
    """
    layers, sides = dict(model.named_modules()), [0]
    first: dict[str, list[int]] = {}
    for name, value in weights.items():
        if ".lora_A." in name and value.ndim > 1:
            first.setdefault(name.partition(".lora_A.")[0], []).append(len(value))
    for target in about.targets:
        parameters = dict(layers[target].named_parameters()) if target in layers else {}
        if not parameters or first.get(target) != [about.rank]:
            raise BadWeightsError(
                f"{path} does not fit its backbone",
                expected=f"low-rank matrices of rank {about.rank} for {target[:200]}",
                found=first.get(target, "none") if parameters else "no such layer",
            )
        sides += [side for value in parameters.values() if value.ndim > 1 for side in (len(value), value[0].numel())]
    if not about.targets or about.rank > max(sides):
        raise BadWeightsError(
            f"{path} does not fit its backbone",
            expected=f"layers for its low-rank matrices, with {about.rank} inputs or outputs at least",
            found=f"{len(about.targets)} layers, the largest with {max(sides)}",
        )


def _about(file: Container, version: str) -> About:
    try:
        if file.metadata.get("format") != FORMAT:
            raise ValueError(f"a file of the format {str(file.metadata.get('format'))[:50]!r}")
        check_version("file of trained weights", version)
        fields = checked.mapping(checked.document(checked.member(file.metadata, "about")))

        def get(name: str) -> Any:
            return checked.member(fields, name)

        def name(value: object) -> str:
            return checked.text(value, most=checked.MAX_NAME)

        return About(
            method=checked.one_of(get("method"), (*get_args(MethodName), FROZEN)),
            base_name=checked.optional(get("base_name"), name),
            fingerprint=checked.sha256(get("fingerprint")),
            preprocessing=Preprocessing.of_json(get("preprocessing")),
            rank=checked.count(get("rank"), least=1, most=_MAX_RANK),
            targets=checked.items(get("targets"), name, most=_MAX_TARGETS),
            extensions={} if version == "1" else parse_extensions(get("extensions")),
        )
    except (ValueError, UnsupportedVersionError) as error:
        raise BadWeightsError(
            f"{file.name} is not a file of a trained backbone that this release can read",
            expected="a file written by `selfmask train`",
            found=getattr(error, "found", error),
            todo=getattr(error, "todo", None),
        ) from error
