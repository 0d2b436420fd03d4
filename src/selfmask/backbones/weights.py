"""Read a weights file without running code from it, and load it into a network it fits, whole or not at all."""

from __future__ import annotations

import argparse
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from .. import checked
from ..errors import BadWeightsError

StateDict = dict[str, Tensor]
# Where training code keeps the weights in a checkpoint. A self-distilled teacher is the better network of the two.
_NESTS = ("teacher", "target_encoder", "state_dict", "model_state_dict", "model", "backbone", "encoder")
# What is trained on top of a backbone, and thrown away.
_HEADS = {"head", "heads", "head_dist", "fc", "classifier", "projection_head", "prototypes"}
_SHOWN = 3


def read_weights(path: Path) -> Mapping[str, Any]:
    """What a .safetensors file, or a file of torch.save, holds: tensors and plain values, never code."""
    if not path.is_file():
        raise BadWeightsError(
            f"there is no weights file {path}", expected="a .safetensors, .pt or .pth file", found="no such file"
        )
    try:
        if path.suffix == ".safetensors":
            stored = load_file(path)
        else:
            # Many training scripts keep their command line beside the weights: plain values too.
            with torch.serialization.safe_globals([argparse.Namespace]), path.open("rb") as file:
                if zipfile.is_zipfile(file):  # not so old
                    checked.archive(file)
                file.seek(0)
                stored = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of a file that can be anything, errors of any kind
        raise BadWeightsError(
            f"cannot read the weights file {path}",
            expected="a .safetensors file, or a state dict saved with torch.save",
            found=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no text'}",
            todo="pickled code is never executed, only tensors are read: if you trust the file, load it yourself and "
            "save its state_dict() with safetensors.torch.save_file",
        ) from error
    if not isinstance(stored, Mapping):
        raise BadWeightsError(
            f"{path} does not contain a state dict", expected="tensors by name", found=f"a {type(stored).__name__}"
        )
    return stored


def read_state(path: Path) -> StateDict:
    """The tensors of a weights file, by their names in the network that training code saved."""
    return _innermost(read_weights(path))


def load_weights(
    model: nn.Module, path: Path, name: str, translate: Callable[[StateDict], StateDict] | None = None
) -> None:
    """Load the file into the network called `name`; prefixes and heads of training code do not matter.

    `translate` maps names of other publishers; it is asked only if the names do not fit as they are.
    """
    stored = read_state(path)
    expected: StateDict = model.state_dict()
    fitting, trouble = _fit(stored, expected)
    if trouble and translate is not None:
        try:
            translated, still = _fit(translate(dict(stored)), expected)
        except Exception:  # made for one publisher's files, it may stumble over any other
            still = trouble
        if not still:
            fitting, trouble = translated, []
    if trouble:
        raise BadWeightsError(
            f"the weights in {path} do not belong to {name}",
            expected=f"{len(expected)} tensors: {_some([_shaped(key, expected[key]) for key in expected])}",
            found="; ".join(trouble),
            todo="name the backbone that these weights belong to, or give the weights of this backbone",
        )
    model.load_state_dict(fitting, strict=False)  # what may be absent was seen to above


def _innermost(stored: Mapping[str, Any]) -> StateDict:
    while inner := next((stored[nest] for nest in _NESTS if isinstance(stored.get(nest), Mapping)), None):
        stored = inner
    return {key: value for key, value in stored.items() if isinstance(value, Tensor)}


def _fit(stored: StateDict, expected: StateDict) -> tuple[StateDict, list[str]]:
    """The tensors of the file under the names of the network, and what is wrong with them."""
    prefix = _common_prefix(stored, expected)
    inside = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
    fitting = {key: value for key, value in inside.items() if key in expected}
    missing = [key for key in expected if key not in inside and not _is_counter(key)]
    misshapen = [
        f"{_shaped(key, value)} instead of {tuple(expected[key].shape)}"
        for key, value in fitting.items()
        if value.shape != expected[key].shape
    ]
    # A deeper network of the same kind has all that is expected, and more in the same places.
    own = {key.partition(".")[0] for key in expected} - _HEADS
    surplus = [key for key in inside if key not in expected and key.partition(".")[0] in own and not _is_counter(key)]
    trouble = []
    if missing:
        trouble.append(f"{len(missing)} missing: {_some(missing)} (the file has {_some(list(stored)) or 'no tensors'})")
    if misshapen:
        trouble.append(f"{len(misshapen)} of another shape: {_some(misshapen)}")
    if surplus:
        trouble.append(f"{len(surplus)} too many: {_some(surplus)}")
    return fitting, trouble


def _common_prefix(stored: StateDict, expected: StateDict) -> str:
    """What stands before the names in the file, `module.backbone.` say: the prefix that explains the most names."""
    seen: Counter[str] = Counter()
    for key in stored:
        parts = key.split(".")
        seen.update(
            ".".join([*parts[:start], ""]) for start in range(len(parts)) if ".".join(parts[start:]) in expected
        )
    return max(seen, key=lambda prefix: (seen[prefix], "teacher" in prefix), default="")


def _is_counter(key: str) -> bool:
    return key.endswith("num_batches_tracked")  # old checkpoints lack it, and nothing is computed from it


def _shaped(key: str, value: Tensor) -> str:
    return f"{key} {tuple(value.shape)}"


def _some(items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
