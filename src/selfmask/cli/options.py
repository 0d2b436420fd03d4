"""Options out of config dataclasses: every setting is one, with its docstring as help.

A setting has its own name, whatever part it lies in: `mask.active_share` is `--active-share`. Where that name is taken,
by an option of the verb or by a setting further out, it gets the name of its part in front: `--mask-seed`. Settings of
a part that comes in kinds (the objective) are one option each, whichever kinds have them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape

from ..settings import KIND, Path, Tree, choices_of, field_help, hints_of, kinds_of, part_of
from ..settings.values import Words, alternatives

_PANELS = {"mask": "Mask", "objective": "Objective", "views": "Views"}
_OPTIMIZER = {"lr", "head_lr", "weight_decay", "momentum", "warmup", "per_tensor", "heads_first", "accumulate"}
_OPPOSITES = {"stratified": "uniform"}
_BEFORE = "resume"  # the parameter that everyday settings come before
N = TypeVar("N")


@dataclasses.dataclass(frozen=True)
class Verb(Generic[N]):
    """What a verb is asked for.

    names: what a run is about, besides its settings: a dataclass, whose fields carry the options they are given by.
    start: the settings that a preset begins with, or their class; it is told what else was given, as far as it depends.
    everyday: settings that are shown first.
    not_options: settings that are no options, by dotted path, and why.
    together: parts whose settings of the same name are one option, but for those that are `apart`.
    free: settings that may change when a run is resumed.
    """

    name: str
    names: type[N]
    config: type
    start: Callable[[str, Tree], Any]
    presets: Sequence[str] = ()
    everyday: Sequence[str] = ("steps", "epochs", "size", "batch_size", "seed")
    not_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    together: Collection[str] = ()
    apart: Collection[str] = ()
    free: Collection[str] = ()


@dataclasses.dataclass
class Setting:
    """One option, and the settings that it stands for."""

    name: str
    paths: list[Path]
    hint: Any
    help: str
    choices: list[str] | None
    default: str | None
    panel: str | None

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_list(self) -> bool:
        return any(_is_sequence(each) and not _is_fixed(each) for each in alternatives(self.hint))

    def parameter(self) -> inspect.Parameter:
        """For typer: None unless the user gives it."""
        kind, declared, metavar = self._type(), [self.option], None
        if self.hint is bool:
            off = _OPPOSITES.get(self.name, f"no-{self.name}").replace("_", "-")
            declared = [f"{self.option}/--{off}"]
        elif self.is_list:
            metavar = "A,B,..."
        elif _is_fixed(self.hint):
            metavar = ",".join("N" for _ in get_args(self.hint))
        option = typer.Option(
            *declared,
            help=escape(self.help),
            rich_help_panel=self.panel,
            show_default=False if self.default is None else escape(self.default),
            metavar=metavar,
        )
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
        )

    def _type(self) -> Any:
        if self.is_list:
            return list[str]
        if self.choices is not None:
            return Literal[tuple(self.choices)]
        plain = [each for each in alternatives(self.hint) if each in (int, float, bool)]
        return plain[0] if plain else str

    def value(self, given: Any) -> Any:
        """What the user gave, for `settings.typed`."""
        return Words(",".join(given)) if self.is_list else Words(given) if isinstance(given, str) else given


@dataclasses.dataclass(frozen=True)
class Given:
    """Names and settings that were given as options; of settings, by which."""

    names: Mapping[str, Any]
    tree: Tree
    marks: Mapping[Path, str]


def command(verb: Verb[Any], function: Callable[..., None]) -> Callable[..., None]:
    """The function with an option for every name and setting; what was given of them it gets as `given`."""
    names = [_with_presets(parameter, verb) for parameter in _names(verb.names)]
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    own = [*names, *(each for each in parameters if each.name != "given")]
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    settings = settings_of(verb, reserved={parameter.name for parameter in own})

    def run(**given: Any) -> None:
        named = {parameter.name: given.pop(parameter.name) for parameter in names}
        tree, marks = Tree(), dict[Path, str]()
        for setting in settings:
            if (value := given.pop(setting.name)) is not None:
                for path in setting.paths:
                    _put(tree, path, setting.value(value))
                    marks[path] = setting.option
        function(**given, given=Given(named, tree, marks))

    shown, last = ([each for each in own if _has_panel(each) is later] for later in (False, True))
    at = next((place for place, parameter in enumerate(shown) if parameter.name == _BEFORE), len(shown))
    first = [each for name in verb.everyday for each in settings if each.name == name]
    rest = sorted((each for each in settings if each.panel is not None), key=_place)
    made = [[each.parameter() for each in part] for part in (first, rest)]
    run.__signature__ = inspect.Signature([*shown[:at], *made[0], *shown[at:], *made[1], *last])  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return run


def _names(names: type) -> Iterator[inspect.Parameter]:
    """Those that can be given as options: None unless the user gives one."""
    for name, hint in get_type_hints(names, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, option, *other = get_args(hint)
            annotation: Any = Annotated[(other or [kind])[0] | None, option]
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _with_presets(parameter: inspect.Parameter, verb: Verb[Any]) -> inspect.Parameter:
    """`preset` takes the presets of the verb."""
    if parameter.name != "preset":
        return parameter
    known = Literal[tuple(verb.presets)]  # type: ignore[valid-type]
    return parameter.replace(annotation=Annotated[known | None, *parameter.annotation.__metadata__])


def _has_panel(parameter: inspect.Parameter) -> bool:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return any(getattr(each, "rich_help_panel", None) is not None for each in metadata)


def settings_of(verb: Verb[Any], reserved: Collection[str] = ()) -> list[Setting]:
    """All options of a verb; `reserved` names are those of its own."""
    starts = {preset: verb.start(preset, {}) for preset in verb.presets} or {"": verb.start("", {})}
    taken: dict[str, Setting | None] = {**dict.fromkeys(reserved), "json": None, "help": None}
    shared: dict[Path, Setting] = {}
    for entry in _entries(verb.config, ()):
        rest = entry.path[1:] if entry.path[0] in verb.together and entry.own not in verb.apart else None
        if rest in shared:
            shared[rest].paths.append(entry.path)
            continue
        name = entry.own
        for part in reversed(entry.path[:-1]):
            if name not in taken:
                break
            name = f"{part}_{name}"
        if ".".join(entry.path) in verb.not_options:
            taken.setdefault(name, None)
            continue
        defaults = {**entry.defaults, **_presets(starts, entry)}
        setting = Setting(
            name,
            [entry.path],
            entry.hint,
            entry.help,
            entry.choices,
            _by(defaults),
            panel=None if name in verb.everyday else _panel(entry.path, entry.own),
        )
        taken[name] = setting
        if rest is not None:
            shared[rest] = setting
    return [setting for setting in taken.values() if setting is not None]


@dataclasses.dataclass(frozen=True)
class _Entry:
    path: Path
    own: str
    hint: Any
    help: str
    choices: list[str] | None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the kinds that have it, if it is a setting of such."""


def _entries(cls: type, path: Path) -> Iterator[_Entry]:
    """The settings of a class, its own first and then those of its parts."""
    helps, hints = field_help(cls), hints_of(cls)
    parts = {name: part for name, hint in hints.items() if (part := part_of(hint)) is not None}
    for name, hint in hints.items():
        if name not in parts:
            yield _Entry((*path, name), name, hint, _sentence(helps.get(name, "")), choices_of(cls, name))
    for name, part in parts.items():
        here = (*path, name)
        if (kinds := kinds_of(part)) is None:
            yield from _entries(part, here)
            continue
        yield _Entry((*here, KIND), name, str, _sentence(helps.get(name, "")), list(kinds))
        yield from _of_kinds(kinds, here)


def _of_kinds(kinds: Mapping[str, type], path: Path) -> Iterator[_Entry]:
    owners: dict[str, list[str]] = {}
    for kind, cls in kinds.items():
        for name in hints_of(cls):
            owners.setdefault(name, []).append(kind)
    for name, of in owners.items():
        hints = [hints_of(kinds[kind])[name] for kind in of]
        fields = {kind: next(each for each in dataclasses.fields(kinds[kind]) if each.name == name) for kind in of}
        helps: dict[str, list[str]] = {}
        for kind in of:
            helps.setdefault(_sentence(field_help(kinds[kind]).get(name, "")), []).append(kind)
        text = " ".join(f"{said} ({', '.join(by)})" for said, by in helps.items())
        choices = choices_of(kinds[of[0]], name) if len(of) == 1 else None
        known = {kind: each.default for kind, each in fields.items() if each.default is not dataclasses.MISSING}
        hint = hints[0] if all(each == hints[0] for each in hints) else str  # `typed` knows which kind it is for
        yield _Entry((*path, name), name, hint, text, choices, known)


def _presets(starts: Mapping[str, Any], entry: _Entry) -> dict[str, Any]:
    """What the presets say; of a setting of some kinds only where it is not what the kind says."""
    if not entry.defaults:
        return {preset: _at(start, entry.path) for preset, start in starts.items()}
    parts = {preset: _at(start, entry.path[:-1]) for preset, start in starts.items()}
    return {
        preset: value
        for preset, part in parts.items()
        if (value := getattr(part, entry.own, None)) is not None and value != entry.defaults.get(part.name)
    }


def _at(start: Any, path: Path) -> Any:
    """The value of a setting, in a config or by default of its class."""
    for name in path:
        if isinstance(start, type):
            (field,) = (field for field in dataclasses.fields(start) if field.name == name)
            start = field.default_factory() if field.default is dataclasses.MISSING else field.default  # type: ignore
        else:
            below = getattr(start, name)
            start = start.suggested(name) if below is None and part_of(hints_of(type(start))[name]) else below
    return start


def _by(values: Mapping[str, Any]) -> str | None:
    """Defaults in words: one for all, or that of the first, and those of the others."""
    texts = {name: text for name, value in values.items() if (text := _shown(value)) is not None}
    if len(set(texts.values())) <= 1 and len(texts) == len(values):
        return next(iter(texts.values()), None)
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    return "; ".join(f"{', '.join(of)}: {text}" for text, of in names.items()) or None


def _shown(value: Any) -> str | None:
    if value is None or value == ():
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return ",".join(str(_shown(each)) for each in value) if isinstance(value, tuple) else str(value)


def _panel(path: Path, name: str) -> str:
    part = next((part for part in path[:-1] if part in _PANELS), "")
    return _PANELS.get(part) or ("Optimizer" if name in _OPTIMIZER else "Running")


def _place(setting: Setting) -> int:
    return [*_PANELS.values(), "Optimizer", "Running"].index(setting.panel or "")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _is_sequence(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Sequence)


def _is_fixed(hint: Any) -> bool:
    return get_origin(hint) is tuple and ... not in get_args(hint)


def _put(tree: Tree, path: Path, value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value
