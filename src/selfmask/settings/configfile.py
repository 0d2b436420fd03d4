"""Config files: TOML, YAML or JSON, with the line of every key, so that mistakes can be pointed at."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from .. import checked
from ..errors import ConfigError

_LARGEST = 4 << 20  # bytes; a run with ten thousand classes keeps less
_WITH_LINES = 1 << 18  # letters of JSON in which keys are looked for: it takes seconds per megabyte
_TOML_TABLE = re.compile(r"\s*\[+([^\[\]]+)\]+\s*(?:#.*)?")
_TOML_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """What a config file says, and on which line each key is, by its path."""

    path: Path
    values: dict[str, Any]
    lines: Mapping[tuple[str, ...], int]


def read_config_file(path: Path) -> ConfigFile:
    """Read a .toml, .yaml, .yml or .json file; nothing in it can run code."""
    readers = {".toml": _toml, ".yaml": _yaml, ".yml": _yaml, ".json": _json}
    if path.suffix.lower() not in readers:
        raise ConfigError(
            f"{path} is not a config file", expected=" or ".join(readers), found=path.suffix or "no suffix"
        )
    try:
        text = checked.content(path, most=_LARGEST).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read", found=getattr(error, "strerror", None) or error, todo="check the path"
        ) from error
    try:
        values, lines = readers[path.suffix.lower()](text)
    except Exception as error:  # yaml raises many kinds on values that are not of the tag they bear
        mark = getattr(error, "problem_mark", None)
        found = f"{getattr(error, 'problem', None)}, line {mark.line + 1}" if mark is not None else error
        raise ConfigError(f"{path} cannot be parsed", expected=path.suffix[1:].upper(), found=found) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} contains no settings", expected="names with values", found=type(values).__name__)
    return ConfigFile(path, values, lines)


def _toml(text: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TOML_TABLE.fullmatch(line):
            table = _parts(match[1])
            lines.setdefault(table, number)
        elif match := _TOML_KEY.match(line):
            lines.setdefault((*table, *_parts(match[1])), number)
    return tomllib.loads(text), lines


def _parts(key: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in key.split("."))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """Reads 5e-4 as a number, as everybody means it and YAML 1.2 has it."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def _yaml(text: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    values, node = yaml.load(text, _Loader), yaml.compose(text, _Loader)  # noqa: S506 - a SafeLoader
    return {} if values is None else values, _lines(node)


def _json(text: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    values = json.loads(text)
    if len(text) > _WITH_LINES:
        return values, {}
    try:
        return values, _lines(yaml.compose(text.replace("\t", " "), _Loader))  # JSON is YAML, but for tabs
    except yaml.YAMLError:  # and for some characters
        return values, {}


def _lines(node: yaml.Node | None) -> dict[tuple[str, ...], int]:
    lines: dict[tuple[str, ...], int] = {}
    seen: set[int] = set()

    def walk(node: yaml.Node | None, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
        if not isinstance(node, yaml.MappingNode) or id(node) in seen:  # an alias may lead round in a circle
            return
        seen.add(id(node))
        for key, value in node.value:
            here = (*path, str(key.value))
            yield here, key.start_mark.line + 1
            yield from walk(value, here)

    for path, line in walk(node, ()):
        if path in lines:
            raise ValueError(f"{'.'.join(path)} is given twice, on lines {lines[path]} and {line}")
        lines[path] = line
    return lines
