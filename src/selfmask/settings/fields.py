"""Settings: nested frozen dataclasses, made of plain values with strict types, and explained by their docstrings.

What the classes may say of themselves, besides types and docstrings:

- `kinds()`, a class method: there are several kinds of this part, by name; a part of settings says which with "name".
- `changed(**changes)`: how to change some settings at once, where others depend on them.
- `suggested(part)`: what a part that is None would be, to change only some of it.
- `metadata={"choices": ...}` of a field: the names that it takes, where its type does not say.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..errors import ConfigError
from .values import Words, alternatives, converted, described, words_of

Path = tuple[str, ...]
"""Where a setting is: the names of the parts it lies in, and its own."""
Tree = dict[str, Any]
"""Settings by name; those of a part are a tree of their own."""
KIND = "name"
"""The key that says which kind of a part is meant."""
_ENTRY = re.compile(r"(\w+(?:, \w+)*): +(.*)")
_hints: dict[type, dict[str, Any]] = {}


@dataclasses.dataclass(frozen=True)
class Where:
    """Where values were given, to be told in errors: `marks` has the line, or the option, of each."""

    name: str = ""
    marks: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    beside: Collection[str] = ()
    """What else can be given there, and could have been meant."""

    def at(self, path: Path) -> str:
        known = next((self.marks[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.marks), "")
        text = ", ".join(part for part in (self.name, known) if part)
        return f" ({text})" if text else ""


# ---- what there is ------------------------------------------------------------------------------------------------


def field_help(cls: type) -> dict[str, str]:
    """What the docstrings of a dataclass and of its bases say of each field: lines `name: text` or `a, b: text`.

    What a class says goes before what its bases say. Lines that go on are indented.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        current: Sequence[str] = ()
        for line in inspect.cleandoc(vars(each).get("__doc__") or "").splitlines():
            if line.startswith(" "):
                found |= {name: f"{found[name]} {line.strip()}" for name in current}
            elif (match := _ENTRY.fullmatch(line)) and names.issuperset(match[1].split(", ")):
                current = match[1].split(", ")
                found |= dict.fromkeys(current, match[2])
            else:
                current = ()
    return found


def hints_of(cls: type) -> dict[str, Any]:
    """The types of the fields of a dataclass."""
    if cls not in _hints:
        hints = get_type_hints(cls)
        _hints[cls] = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return _hints[cls]


def choices_of(cls: type, name: str) -> list[str] | None:
    """The names that a field takes, or each item of a list of them, if they are known."""
    (field,) = (field for field in dataclasses.fields(cls) if field.name == name)
    if "choices" in field.metadata:
        return list(field.metadata["choices"])
    for hint in alternatives(hints_of(cls)[name]):
        for each in (hint, *get_args(hint)):
            if get_origin(each) is Literal:
                return list(get_args(each))
    return None


def part_of(hint: Any) -> type | None:
    """The dataclass, if the type is one, or one or None."""
    return next((each for each in alternatives(hint) if dataclasses.is_dataclass(each)), None)  # type: ignore[return-value]


def kinds_of(cls: type) -> Mapping[str, type] | None:
    """The kinds of a part by name, where there are several."""
    kinds = getattr(cls, "kinds", None)
    return None if kinds is None else kinds()


def to_dict(config: Any) -> Tree:
    """All settings as plain values; `typed` and `merged` take them back."""
    tree: Tree = {} if kinds_of(type(config)) is None else {KIND: config.name}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            own = getattr(value, "to_dict", None)
            value = to_dict(value) if own is None else own()
        tree[field.name] = value
    return tree


def leaves(tree: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All settings of a tree, one by one."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


# ---- from plain values --------------------------------------------------------------------------------------------


def typed(start: Any, values: Mapping[str, Any], where: Where | None = None) -> Tree:
    """The values with the types that the settings have; what does not fit is refused.

    start: the settings that they will change, or the class that they will make: it tells which kind of a part is meant.
    """
    cls, config = (start, None) if isinstance(start, type) else (type(start), start)
    return _typed(cls, config, values, where or Where(), ())


def _typed(cls: type, start: Any, values: Mapping[str, Any], where: Where, path: Path) -> Tree:
    tree: Tree = {}
    if (kinds := kinds_of(cls)) is not None:
        own = "" if start is None else str(start.name)
        name = values.get(KIND, own)
        if not isinstance(name, str) or name not in kinds:
            raise _no_choice((*path, KIND), name, kinds, where)
        if KIND in values:
            tree[KIND] = str(name)
        cls, values = kinds[name], {key: value for key, value in values.items() if key != KIND}
        if own != name:
            start = None
    hints = hints_of(cls)
    for key, value in values.items():
        here = (*path, str(key))
        if key not in hints:
            raise _unknown(cls, str(key), kinds, here, where)
        if (part := part_of(hints[key])) is not None and value is not None:
            if not isinstance(value, Mapping):
                raise _wrong(here, value, "a table of settings", where)
            tree[key] = _typed(part, getattr(start, key, None), value, where, here)
            continue
        _check_choice(cls, key, value, where, here)
        try:
            tree[key] = converted(hints[key], value)
        except ValueError:
            raise _wrong(here, value, described(hints[key]), where) from None
    return tree


def _check_choice(cls: type, key: str, value: Any, where: Where, path: Path) -> None:
    choices = choices_of(cls, key)
    for word in words_of(value) if isinstance(value, Words | list | tuple) else [value]:
        if choices is not None and isinstance(word, str) and word not in choices:
            raise _no_choice(path, str(word), choices, where)


def merged(start: Any, tree: Mapping[str, Any]) -> Any:
    """The settings, changed as the tree says, which `typed` has made; or new ones, of a class."""
    cls, config = (start, None) if isinstance(start, type) else (type(start), start)
    return _merged(cls, config, tree)


def _merged(cls: type, start: Any, tree: Mapping[str, Any]) -> Any:
    kinds = kinds_of(cls)
    if kinds is not None:
        name = tree.get(KIND) or start.name
        cls, tree = kinds[name], {key: value for key, value in tree.items() if key != KIND}
        start = start if start is not None and start.name == name else None
    changes, left = dict[str, Any](), dict[str, Any]()
    for name, value in tree.items():
        part = part_of(hints_of(cls)[name])
        if part is None or value is None:
            changes[name] = value
        elif start is not None and getattr(start, name) is None and hasattr(start, "suggested"):
            left[name] = value  # what it is now may depend on the other changes
        else:
            changes[name] = _merged(part, getattr(start, name, None), value)
    done = _changed(cls, start, changes)
    for name, value in left.items():
        suggested = done.suggested(name)
        done = _changed(cls, done, {name: _merged(type(suggested), suggested, value)})
    return done


def _changed(cls: type, start: Any, changes: Mapping[str, Any]) -> Any:
    if start is None:
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is field.default_factory is dataclasses.MISSING and field.name not in changes
        ]
        if missing:
            raise ConfigError(f"{cls.__name__} lacks required settings", expected=", ".join(missing))
        return cls(**changes)
    return start.changed(**changes) if hasattr(start, "changed") else dataclasses.replace(start, **changes)


def _unknown(cls: type, key: str, kinds: Mapping[str, type] | None, path: Path, where: Where) -> ConfigError:
    owners = [name for name, kind in (kinds or {}).items() if key in hints_of(kind)]
    if owners:
        chosen = next((name for name, kind in (kinds or {}).items() if kind is cls), "")
        return ConfigError(
            f"{chosen} has no setting {key!r}{where.at(path)}",
            expected=f"one of {', '.join(hints_of(cls))}",
            todo=f"{' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} it: choose another, or omit it",
        )
    names = {name: name for name in hints_of(cls)} | {".".join(deep): deep[-1] for deep in _paths(cls)}
    near = [dotted for dotted, name in names.items() if name == key]
    own = [*hints_of(cls), *(where.beside if len(path) == 1 else ())]
    near = near or difflib.get_close_matches(key, own, n=1, cutoff=0.5)
    near = near or [dotted for dotted, name in names.items() if difflib.get_close_matches(key, [name], cutoff=0.75)]
    todo = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(own)}"
    return ConfigError(f"there is no setting {'.'.join(path)!r}{where.at(path)}", todo=todo)


def _paths(cls: type, path: Path = ()) -> Iterator[Path]:
    """All settings of a class, those of its parts included."""
    for name, hint in hints_of(cls).items():
        if (part := part_of(hint)) is None:
            yield (*path, name)
            continue
        for each in {part, *(kinds_of(part) or {}).values()}:
            yield from _paths(each, (*path, name))


def _wrong(path: Path, value: object, expected: str, where: Where) -> ConfigError:
    return ConfigError(
        f"{'.'.join(path)} has a value of the wrong type{where.at(path)}", expected=expected, found=reprlib.repr(value)
    )


def _no_choice(path: Path, value: object, choices: Collection[str], where: Where) -> ConfigError:
    near = difflib.get_close_matches(str(value), choices, n=1)
    name = ".".join(path[:-1] if path[-1] == KIND else path)
    return ConfigError(
        f"unknown {name}{where.at(path)}",
        expected=", ".join(choices),
        found=reprlib.repr(value),
        todo=f"did you mean {near[0]!r}?" if near else None,
    )
