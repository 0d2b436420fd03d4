"""Is this the base that a mask was learned on? And which of its weights carry a bit?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import BaseWarning, ConfigError, CorruptMaskFileError, WrongBaseError
from .fingerprint import Fingerprints, State
from .manifest import Manifest
from .mask import Bits

Choose = Callable[[Mapping[str, Any], Iterable[str]], dict[str, Bits]]
"""Tells by config and names which weights carry a bit: packed flags; nothing where all do."""


class Base(NamedTuple):
    """What masks are read for: its parameters, its batch-norm statistics, and all that it is; and what was hashed."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    state: State
    fingerprints: Fingerprints
    choose: Choose


def check_base(
    manifest: Manifest,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    state: State,
    fingerprints: Fingerprints,
) -> None:
    """Names and shapes first, then the bytes: of the masked weights, then of all the rest."""
    todo = f"load the mask on {manifest.base_name or 'the base it was learned on'}, with the same weights"
    if not manifest.masks:
        raise CorruptMaskFileError("the mask file contains no masks", expected="at least one tensor", found="none")
    for name, entry in manifest.masks.items():
        shape = tuple(parameters[name].shape) if name in parameters else "no such parameter"
        if shape != entry.shape:
            expected = f"{name} of shape {entry.shape}"
            raise WrongBaseError("the mask is for another base", expected=expected, found=shape, todo=todo)
    if manifest.base_fingerprint is not None:
        fingerprints.of(state.stored)  # all at once, on all cores; what follows knows their hashes
    checks = [("weights", {name: parameters[name] for name in manifest.masks}, manifest.fingerprint)]
    if manifest.norm_fingerprint is not None:
        checks.append(("batch-norm statistics", dict(buffers), manifest.norm_fingerprint))
    for what, tensors, expected in checks:
        if (found := fingerprints.of(tensors)) != expected:
            raise WrongBaseError(
                f"the mask was learned on other {what}, with the same architecture",
                expected=f"fingerprint {expected[:16]}",
                found=found[:16],
                todo=todo,
            )
    # What is not masked decides the output as much: biases, norm layers, position embeddings, heads.
    known = manifest.base_fingerprint
    if known is not None and (found := fingerprints.of(state.stored)) != known:
        raise WrongBaseError(
            "the base has the masked weights that the mask was learned on, but is another beside them",
            expected=f"{manifest.base_tensors} tensors, fingerprint {known[:16]}",
            found=f"{len(state.stored)} tensors, fingerprint {found[:16]}",
            todo=f"load {manifest.base_name or 'the base'} as it was: with the same biases, norm layers, statistics "
            "and head (or without one, if it had none)",
        )


def warn_of_base(manifest: Manifest, state: State, fingerprints: Fingerprints) -> None:
    """Say what of the base could not be checked, or is only perhaps as it was."""
    if manifest.base_fingerprint is None:
        warnings.warn(
            f"this mask is from a file of format version 1: only the {len(manifest.masks)} masked tensors of the base "
            f"could be checked, not the other {len(state.stored) - len(manifest.masks)} (norm layers, biases and all "
            "else that is not masked); if these are not as they were, the vectors are wrong",
            BaseWarning,
            stacklevel=2,
        )
        return
    tables = fingerprints.of(state.tables) if state.tables else None
    if tables != manifest.tables_fingerprint:
        warnings.warn(
            "the weights of the base are those that the mask was learned on, but the tables that its code makes "
            "(buffers that are not persistent) are others: for another image size, or by another release of it",
            BaseWarning,
            stacklevel=2,
        )


def chosen_by(manifest: Manifest, choose: Choose) -> dict[str, Bits]:
    try:
        return choose(manifest.config, manifest.masks)
    except ConfigError as error:
        raise CorruptMaskFileError("the settings in the mask file are not valid", found=error.what) from error
