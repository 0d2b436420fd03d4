"""Extensions: what later releases add to a file, and how earlier ones know whether they can do without it.

An extension has a name, a version, words (any small JSON value) and tensors of its own, "ext.NAME.KEY". Who does not
know a *required* one cannot use the file; an optional one that is not known is passed over, though its bytes are
counted and hashed like all others.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from .. import checked
from ..errors import ConfigError, UnsupportedVersionError

PREFIX = "ext."
SHARE = "share"
"""Who may use the file, what it was learned from and how: `licence`, `data`, `training`, each text or small JSON."""
NORM_CODES = "norm_codes"
"""Batch-norm statistics in few bits (`norm_codes.py`), in the one tensor `CODES`."""
CODES = f"{PREFIX}{NORM_CODES}.codes"
_KNOWN = {SHARE: 1, NORM_CODES: 1}  # the latest version of each that this release can use
_SHARED = ("licence", "data", "training")
_MOST, _MAX_WORDS, _MAX_VALUES = 32, 1 << 16, 2000
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclasses.dataclass(frozen=True)
class Extension:
    """One extension, as a file declares it."""

    version: int
    required: bool
    words: Any = None


def parse_extensions(value: object) -> dict[str, Extension]:
    """All extensions of a file, those that are not known too; a ValueError where they are not of the form."""
    found = {_name(name): _extension(name, fields) for name, fields in checked.mapping(value, most=_MOST).items()}
    missing = [name for name, each in found.items() if each.required and not is_known(name, each)]
    if missing:
        raise UnsupportedVersionError(
            "this file can only be used with a newer release of selfmask",
            expected=", ".join(f"{name} up to version {version}" for name, version in _KNOWN.items()),
            found=", ".join(f"{name} version {found[name].version}, which is required" for name in missing[:3]),
            todo="upgrade selfmask",
        )
    return found


def is_known(name: str, extension: Extension) -> bool:
    """Whether this release can use it."""
    return extension.version <= _KNOWN.get(name, 0)


def owner(key: str) -> str | None:
    """The extension that a tensor belongs to, by its key in the file; None if to none."""
    return key.split(".", 2)[1] if key.startswith(PREFIX) and key.count(".") > 1 else None


def sharing(**words: Any) -> dict[str, Extension]:
    """The extension that says who may use a file, and what it comes from."""
    return parse_extensions({SHARE: dataclasses.asdict(Extension(1, False, words))})


def licence_of(extensions: Mapping[str, Extension]) -> str | None:
    """The licence that a file names, if it is a word."""
    words = extensions[SHARE].words if SHARE in extensions else None
    found = words.get("licence") if isinstance(words, dict) else None
    return found if isinstance(found, str) else None


def shared(
    extensions: Mapping[str, Extension], *, licence: str | None, data: str | None, trained_with: Any = None
) -> dict[str, Extension]:
    """The extensions of a file, with some of these words said anew; those that are None stay as they are."""
    said = {"licence": licence, "data": data, "training": trained_with}
    said = {name: value for name, value in said.items() if value is not None}
    if not said:
        return dict(extensions)
    before = extensions[SHARE].words if SHARE in extensions else {}
    try:
        return {**extensions, **sharing(**{**before, **said})}
    except ValueError as error:
        raise ConfigError(
            "what the file is to say of its licence, data or training cannot be stored",
            expected="text or small JSON, without control characters",
            found=str(error)[:200],
        ) from error


def _extension(name: str, value: object) -> Extension:
    fields = checked.mapping(value, most=3)
    words = checked.plain(checked.member(fields, "words"), most=_MAX_VALUES)
    if len(json.dumps(words)) > _MAX_WORDS:
        raise ValueError(f"more than {_MAX_WORDS} bytes of words in the extension {name}")
    version = checked.count(checked.member(fields, "version"), least=1, most=1 << 31)
    extension = Extension(version, checked.flag(checked.member(fields, "required")), words)
    if name == SHARE and is_known(name, extension):
        for key, part in checked.mapping(words).items():
            checked.one_of(key, _SHARED)
            _check_shown(part)
    if name == NORM_CODES and is_known(name, extension) and (not extension.required or words is not None):
        raise ValueError(f"the extension {name} is required, and has no words")
    return extension


def _check_shown(value: object) -> None:
    """What is made to be shown holds nothing that would steer a terminal, or show as what it is not."""
    if isinstance(value, str):
        checked.printable(value)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            checked.printable(name)
            _check_shown(part)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_shown(part)


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"{value[:50]!r} is no name of an extension")
    return value
