"""Plain values, as JSON, TOML, YAML or a user has them, with the types that settings have."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin

_LARGEST = 2**63 - 1
_WILDCARDS = set("*?[")


class Words(str):
    """A value as it was typed: what it means depends on the setting that it is for. Lists are parted by commas."""


def words_of(value: Any) -> Any:
    """The items of a list that was typed; anything else as it is."""
    return [Words(word.strip()) for word in value.split(",") if word] if isinstance(value, Words) else value


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types that a value may have."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def converted(hint: Any, value: Any) -> Any:
    """The value as the type has it, or a ValueError. Numbers are finite, and none is beyond those of 64 bits."""
    options = alternatives(hint)
    if len(options) > 1:
        return _converted_to_one(options, value)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value in inner:
            return str(value) if isinstance(value, Words) else value
    elif origin is tuple or (isinstance(origin, type) and issubclass(origin, Sequence)):
        if isinstance(items := words_of(value), list | tuple):
            each = inner if origin is tuple and inner[-1] is not ... else inner[:1] * len(items)
            return tuple(converted(*pair) for pair in zip(each, items, strict=True))
    elif isinstance(value, Words):
        if hint is bool and value in ("true", "false"):
            return value == "true"
        if hint is str:
            return str(value)
        if hint in (int, float):
            return _bounded(hint(value))
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(_bounded(value))
    elif hint is int and type(value) is int:
        return _bounded(value)
    elif hint is Any or type(value) is hint:
        return value
    raise ValueError


def _bounded(value: Any) -> Any:
    if not -_LARGEST <= value <= _LARGEST:  # also if it is not a number
        raise ValueError
    return value


def _converted_to_one(hints: Sequence[Any], value: Any) -> Any:
    listed = [hint for hint in hints if get_origin(hint) is not None and get_origin(hint) is not Literal]
    if isinstance(value, Words) and listed and ("," in value or set(value) & _WILDCARDS):
        hints = listed  # one word is a name, unless it is a pattern
    for hint in hints:
        if hint is types.NoneType:
            if value is None:
                return None
            continue
        try:
            return converted(hint, value)
        except ValueError:
            continue
    raise ValueError


_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "nothing"}


def described(hint: Any) -> str:
    """The type in words."""
    options = [each for each in alternatives(hint) if each is not types.NoneType]
    if len(options) > 1:
        return ", or ".join(map(described, options))
    (hint,) = options
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(map(str, inner))
    if origin is tuple and inner[-1] is not ...:
        return f"a list of {len(inner)}, each {described(inner[0])}"
    if origin is not None:
        return f"a list, each {described(inner[0])}"
    return _PLAIN.get(hint, str(hint))
