"""What a run was asked for: by options, by a config file, or by the run that is to be continued."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import typer

from ..data.images import MAX_PIXELS
from ..data.named import BUNDLED
from ..data.partition import LearnedSplit
from ..errors import ConfigError, RunDamagedError, RunMismatchError
from ..files import RunFile
from ..settings import Tree, Where, hints_of, leaves, merged, typed
from ..settings.configfile import ConfigFile, read_config_file
from ..training.config import ASIDE
from .options import Given, Verb

ResumeOption = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Continue the run in this folder exactly; no other option is needed.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Settings file (.toml, .yaml or .json), or a run folder whose settings to reuse. Options may add to it.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


_RUNNING = "Running"  # the panel of options that are seldom needed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """What a run is about, besides its settings; a run folder keeps it. What is annotated can be given as an option.

    A type at the end of an annotation is that of the option, if it is another.
    """

    images: str | None = None
    backbone: Annotated[
        str | None, typer.Option(help="Name of the backbone; see `selfmask backbones`.", show_default="resnet50")
    ] = "resnet50"
    features: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE",
            help="Cut the backbone at this module, stages.2 for instance: its output, averaged over places or tokens, "
            "is the vector, and what lies behind is not used. Short for --backbone NAME#MODULE.",
            rich_help_panel=_RUNNING,
        ),
    ] = None
    weights: Annotated[
        str | None, typer.Option(help="File with the backbone's weights.", rich_help_panel=_RUNNING), Path
    ] = None
    preset: str | None = "fast"
    max_bad: Annotated[
        float,
        typer.Option(
            help="Largest share of images that may be unreadable.", show_default="0.05", rich_help_panel=_RUNNING
        ),
    ] = 0.05
    max_pixels: Annotated[
        int,
        typer.Option(
            help="Largest number of pixels of an image; those with more count as unreadable.",
            show_default=f"{MAX_PIXELS:,}",
            rich_help_panel=_RUNNING,
        ),
    ] = MAX_PIXELS


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnNames(Names):
    """Where no labels are needed: and which of the images are learned from."""

    images: Annotated[
        str | None, typer.Argument(help="A folder, a list file, an .npz file or the name of a data set.")
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(
            help="Settings to start from: fast takes minutes; paper and reference follow the paper's text and code.",
            show_default="fast",
        ),
    ] = "fast"
    split: Annotated[
        LearnedSplit,
        typer.Option(
            help="Images to learn from: train leaves out what `evaluate` tests with (the test split, or a fifth of "
            "each class of labelled images), all does not.",
            show_default="train",
        ),
    ] = "train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledNames(Names):
    """Where labels are needed."""

    images: Annotated[
        str | None,
        typer.Argument(help="Labelled images: a folder with a sub-folder for each class, or the name of a data set."),
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(
            help="Settings to start from: fast takes minutes; paper and reference follow the paper's text and code.",
            show_default="fast",
        ),
    ] = "fast"


_PLACES = ("images", "weights", "dispatcher", "start")
"""Names of files: they may have moved, and then what is in them decides."""
_FREE = ("max_bad", "workers")
"""What may change when a run is resumed, besides settings that do not decide the result."""
_INSIDE = "config"  # where a run's own file has the settings
N = TypeVar("N", bound=Names)
C = TypeVar("C")


@dataclasses.dataclass(frozen=True)
class Asked(Generic[N, C]):
    """All of it. `out` is None where the folder is left to the verb."""

    names: N
    config: C
    out: Path | None
    resume: bool

    @property
    def images(self) -> str:
        if self.names.images is None:
            raise ConfigError("no images were given", todo="name a folder, or a run to continue: --resume RUN")
        return self.names.images

    @property
    def weights(self) -> Path | None:
        return None if self.names.weights is None else Path(self.names.weights)

    @property
    def backbone(self) -> str:
        if self.names.backbone is None:
            raise ConfigError("the run does not name its backbone", todo="name it: --backbone")
        return self.names.backbone

    def folder(self, ending: str = "") -> Path:
        """The run folder: as asked for, or named after the images."""
        return self.out or Path("runs") / f"{Path(self.images).resolve().stem}{ending}"

    @property
    def about(self) -> dict[str, Any]:
        """What the run folder should keep, to be continued from it alone."""
        names = dataclasses.asdict(self.names)
        del names["features"]  # part of the backbone's name
        return names


@dataclasses.dataclass
class _Source:
    """Names and settings from one place, and where in it."""

    names: Tree
    settings: Tree
    where: Where


def ask(
    verb: Verb[N], given: Given, *, out: Path | None, resume: Path | None, config: Path | None, **more: Any
) -> Asked[N, Any]:
    """Bring together what was asked for; what contradicts itself, or the run to be resumed, is refused.

    more: names besides those of options; those that are None were not given.
    """
    names, named = verb.names, {**given.names, **more}
    own = {name: str(value) if isinstance(value, Path) else value for name, value in named.items() if value is not None}
    marks: dict[tuple[str, ...], str] = {(name,): f"--{name.replace('_', '-')}" for name in own}
    marks |= {("images",): "the argument", ("class_names",): "--classes", ("templates",): "--template"}
    options = _Source(_whole(typed(names, own)), given.tree, Where("", {**marks, **given.marks}))
    file = None if config is None else _of_file(verb, _config_file(config))
    run = None if resume is None else _of_run(verb, resume)
    sources = [source for source in (run, file, options) if source is not None]
    told: N = merged(names, _joined(*(source.names for source in sources)))
    if not verb.presets:
        told = dataclasses.replace(told, preset=None)
    elif told.preset not in (None, *verb.presets):
        raise ConfigError(f"there is no preset {told.preset!r}", expected=" or ".join(verb.presets))
    start = base = verb.start(told.preset or "fast", _joined(*(source.settings for source in sources)))
    tree = Tree()
    for source in sources:  # which settings an objective has depends on the one that was chosen before
        source.settings = typed(base, source.settings, source.where)
        tree = _joined(tree, source.settings)
        base = base if source is options else merged(start, tree)
    if run is not None and resume is not None:
        for source in sources[1:]:
            _check_run(verb, resume, run, source)
        if out is not None and out.resolve() != resume.resolve():
            raise RunMismatchError("--resume and --out name different folders", expected=resume, found=out)
    if file is not None:
        _check(file, options)
    return Asked(told, merged(start, tree), resume or out, resume is not None)


def of_run(verb: Verb[N], folder: Path) -> Asked[N, Any]:
    """What a run was asked for when it was begun."""
    return ask(verb, Given({}, {}, {}), out=None, resume=folder, config=None)


def _config_file(path: Path) -> ConfigFile:
    return read_config_file(path / RunFile.CONFIG if path.is_dir() else path)


def _of_file(verb: Verb[N], file: ConfigFile) -> _Source:
    """A file that the user wrote, or one that a run keeps: there, settings are a part of it."""
    values, place, names = dict(file.values), tuple[str, ...](), verb.names
    if isinstance(values.get(_INSIDE), Mapping) and "verb" in values:
        if values["verb"] != verb.name:
            raise ConfigError(
                f"{file.path} is from `selfmask {values['verb']}`", expected=verb.name, todo="give another file"
            )
        settings, place = values.pop(_INSIDE), (_INSIDE,)
        values = {key: value for key, value in values.items() if key in hints_of(names)}
    else:
        settings = {key: values.pop(key) for key in list(values) if key not in hints_of(names)}
    lines = {path: f"line {line}" for path, line in file.lines.items()}
    told = typed(names, values, Where(str(file.path), lines))
    if place:
        lines = {path[1:]: line for path, line in lines.items() if path[:1] == place and path[1:]}
    return _Source(_whole(told), dict(settings), Where(str(file.path), lines, tuple(hints_of(names))))


def _of_run(verb: Verb[N], folder: Path) -> _Source:
    file = folder / RunFile.CONFIG
    if not file.is_file():
        raise RunDamagedError(
            f"{folder} is not a run folder of `selfmask {verb.name}`",
            expected=f"{RunFile.CONFIG}, which `selfmask {verb.name} --out {folder}` writes",
            found="no such file" if folder.is_dir() else "no such folder",
            todo="check the path; if the run had only just started, start it again",
        )
    try:
        read = read_config_file(file)
    except ConfigError as error:
        raise RunDamagedError(error.what, found=error.found, todo="start again in another folder: --out") from error
    if read.values.get("verb") != verb.name or not isinstance(read.values.get(_INSIDE), Mapping):
        other = read.values.get("verb")
        raise RunMismatchError(
            f"the run in {folder} is not from `selfmask {verb.name}`",
            found=f"a run of `selfmask {other}`" if other else "a file without settings",
            todo=f"continue it with: selfmask {other} --resume {folder}" if other else "check the path",
        )
    return _of_file(verb, read)


def _whole(names: Tree) -> Tree:
    """With whole paths, so that they are found from anywhere (names of data sets stay), and the cut in the name of the
    backbone: all that is written keeps that."""
    names = {**names}
    if (features := names.pop("features", None)) is not None:
        if names.get("backbone") is None:
            raise ConfigError("--features needs the name of the backbone that it cuts", todo="name it: --backbone NAME")
        names["backbone"] = f"{names['backbone']}#{features}"
    paths = {name: names[name] for name in _PLACES if names.get(name) is not None and names[name] not in BUNDLED}
    return {**names, **{name: str(Path(path).resolve()) for name, path in paths.items() if _exists(path)}}


def _exists(path: str) -> bool:
    return os.path.exists(path)  # noqa: PTH110  # Path.exists raises on names that no path can have


def _joined(*trees: Mapping[str, Any]) -> Tree:
    """One tree of all; the later ones go first."""
    found: Tree = {}
    for tree in trees:
        for name, value in tree.items():
            before = found.get(name)
            both = isinstance(value, Mapping) and isinstance(before, Mapping)
            found[name] = _joined(before, value) if both and before is not None else value
    return found


def _check(file: _Source, options: _Source) -> None:
    """An option may add to a config file, but not contradict it."""
    for before, after in ((file.names, options.names), (file.settings, options.settings)):
        said = dict(leaves(before))
        differ = {path: value for path, value in leaves(after) if path in said and said[path] != value}
        if differ:
            raise ConfigError(
                "options contradict the config file",
                expected=", ".join(f"{_dotted(path)} = {said[path]!r}{file.where.at(path)}" for path in differ),
                found=", ".join(f"{_dotted(p)} = {value!r}{options.where.at(p)}" for p, value in differ.items()),
                todo="omit one of them",
            )


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path)


def _check_run(verb: Verb[N], folder: Path, run: _Source, source: _Source) -> None:
    """A run goes on as it began."""
    differ: dict[str, tuple[Any, Any]] = {}
    for name, value in source.names.items():
        before = run.names.get(name)
        moved = name in _PLACES and before is not None and Path(before).is_absolute() and not _exists(before)
        if name not in _FREE and before is not None and before != value and not moved:
            differ[name] = before, value
    said = dict(leaves(run.settings))
    for path, value in leaves(source.settings):
        if path[-1] not in ASIDE and path[0] not in verb.free and said.get(path) != value:
            differ[_dotted(path)] = said.get(path), value
    if differ:
        raise RunMismatchError(
            f"{folder} was started with other settings",
            expected=", ".join(f"{name} = {old!r}" for name, (old, _) in differ.items()),
            found=", ".join(f"{name} = {new!r}" for name, (_, new) in differ.items()),
            todo="omit these options (the run folder stores its settings), or start another run with --out",
        )
