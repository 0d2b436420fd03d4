"""Settings from plain values: types, kinds, parts, and what is said of mistakes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from selfmask import AdaptConfig
from selfmask.errors import ConfigError
from selfmask.settings import Where, field_help, leaves, merged, to_dict, typed
from selfmask.settings.configfile import read_config_file
from selfmask.settings.values import Words


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape.

    colour: of the inside.
    """

    name: ClassVar[str] = ""
    colour: str = "red"

    @classmethod
    def kinds(cls) -> Mapping[str, type[Shape]]:
        return {"circle": Circle, "square": Square}


@dataclasses.dataclass(frozen=True)
class Circle(Shape):
    """Round.

    radius: from the middle.
    """

    name = "circle"
    radius: float = 1.0


@dataclasses.dataclass(frozen=True)
class Square(Shape):
    """Not round.

    side: of it.
    """

    name = "square"
    side: int = 1


@dataclasses.dataclass(frozen=True)
class Base:
    """What all have.

    Note: this is no field.
    count: how many,
        and no more.
    low, high: from and to.
    """

    count: int = 3
    low: float = 0.0
    high: float = 1.0


@dataclasses.dataclass(frozen=True)
class Config(Base):
    """Of its own.

    count: said anew.
    shape: which.
    """

    shape: Shape = dataclasses.field(default_factory=Circle)
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    pair: tuple[float, float] = (0.0, 1.0)
    names: Sequence[str] = ()
    which: str | Sequence[str] = "auto"
    size: int | None = None


def test_docstrings_are_help() -> None:
    assert field_help(Base) == {"count": "how many, and no more.", "low": "from and to.", "high": "from and to."}
    assert field_help(Config)["count"] == "said anew."
    assert field_help(Circle) == {"colour": "of the inside.", "radius": "from the middle."}


def test_values_take_the_types_of_the_fields() -> None:
    values = {"low": 2, "pair": [1, 2], "names": ["x"], "size": None, "shape": {"radius": 3}}
    tree = typed(Config(), values)
    assert tree == {"low": 2.0, "pair": (1.0, 2.0), "names": ("x",), "size": None, "shape": {"radius": 3.0}}
    assert isinstance(tree["low"], float)
    assert merged(Config(), tree) == Config(low=2.0, pair=(1.0, 2.0), names=("x",), shape=Circle(radius=3.0))
    assert merged(Config, {}) == Config()


@pytest.mark.parametrize(
    ("name", "words", "value"),
    [
        ("pair", "0.1,2", (0.1, 2.0)),
        ("names", "a, b", ("a", "b")),
        ("names", "", ()),
        ("which", "paper", "paper"),
        ("which", "*.bias", ("*.bias",)),
        ("which", "one,", ("one",)),
        ("which", "a,b", ("a", "b")),
        ("kind", "b", "b"),
        ("count", "4", 4),
        ("flag", "true", True),
    ],
)
def test_words_mean_what_the_field_takes(name: str, words: str, value: Any) -> None:
    found = typed(Config(), {name: Words(words)})[name]
    assert found == value
    assert type(found) is type(value)


def test_a_part_of_another_kind_begins_anew() -> None:
    start = Config(shape=Circle("blue", 2.0))
    assert merged(start, typed(start, {"shape": {"name": "circle"}})) == start
    assert merged(start, typed(start, {"shape": {"colour": "green"}})).shape == Circle("green", 2.0)
    assert merged(start, typed(start, {"shape": {"name": "square", "side": 2}})).shape == Square("red", 2)


def test_there_and_back() -> None:
    config = Config(shape=Square("blue", 4), names=("x", "y"), which=("a",))
    plain = json.loads(json.dumps(to_dict(config)))
    assert plain["shape"] == {"name": "square", "colour": "blue", "side": 4}
    assert merged(Config(), typed(Config(), plain)) == config
    assert (("shape", "side"), 4) in list(leaves(plain))


@pytest.mark.parametrize("preset", ["fast", "paper", "reference"])
def test_every_preset_goes_there_and_back(preset: str) -> None:
    config, other = AdaptConfig.preset(preset), AdaptConfig.preset("fast" if preset != "fast" else "paper")
    plain = json.loads(json.dumps(config.to_dict()))
    assert merged(other, typed(other, plain)).to_dict() == config.to_dict()


def test_what_depends_on_a_setting_follows_it() -> None:
    start = AdaptConfig.preset("fast")
    config = merged(start, typed(start, {"mask": {"rule": "topk"}, "objective": {"name": "swav"}, "epochs": 2}))
    assert config.mask.score_init == "kaiming"
    assert config.chosen_views.small == 6  # as suits SwAV
    assert (config.steps, config.epochs) == (None, 2.0)
    some = merged(start, typed(start, {"views": {"flip_p": 0}}))
    assert some.views == dataclasses.replace(start.chosen_views, flip_p=0.0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"cuont": 1}, "did you mean 'count'"),
        ({"radius": 1}, "did you mean 'shape.radius'"),
        ({"backbon": 1}, "did you mean 'backbone'"),
        ({"xyzzy": 1}, "use one of count"),
        ({"count": 1.5}, "a whole number"),
        ({"count": True}, "a whole number"),
        ({"count": "3"}, "a whole number"),
        ({"low": "much"}, "a number"),
        ({"flag": 1}, "true or false"),
        ({"pair": [1.0]}, "a list of 2"),
        ({"names": "x"}, "a list, each text"),
        ({"names": [1]}, "a list, each text"),
        ({"kind": "c"}, "a, b"),
        ({"shape": 3}, "a table of settings"),
        ({"shape": {"name": "circel"}}, "did you mean 'circle'"),
        ({"shape": {"name": ["circle"]}}, "unknown shape"),
        ({"shape": {"side": 1}}, "square has it"),
        ({"shape": {"colur": "x"}}, "did you mean 'colour'"),
    ],
)
def test_mistakes_are_told_with_place_and_remedy(values: dict[str, Any], said: str) -> None:
    (path, _), *_ = leaves(values)
    where = Where("photos.toml", {path[:1]: "line 7"}, beside=("images", "backbone"))
    with pytest.raises(ConfigError) as error:
        typed(Config(), values, where)
    assert "(photos.toml, line 7)" in str(error.value)
    assert said in str(error.value)


# ---- files ----------------------------------------------------------------------------------------------------------

TOML = """
steps = 300  # few
weight_decay = 5e-4

[mask]
rule = "topk"
exclude = [
  "*.bias",
]
[objective]
name = "swav"
views.x = 1
"""
YAML = """
steps: 300
weight_decay: 5e-4
mask:
  rule: topk
  exclude:
  - "*.bias"
objective: {name: swav, views: {x: 1}}
"""
WANTED = {
    "steps": 300,
    "weight_decay": 5e-4,
    "mask": {"rule": "topk", "exclude": ["*.bias"]},
    "objective": {"name": "swav", "views": {"x": 1}},
}


def lines(path: Path) -> Mapping[tuple[str, ...], int]:
    file = read_config_file(path)
    assert file.values == WANTED
    return file.lines


def test_every_format_says_the_same_and_where(tmp_path: Path) -> None:
    for name, text in (
        ("a.toml", TOML),
        ("a.yaml", YAML),
        ("a.yml", YAML),
        ("a.json", json.dumps(WANTED, indent="\t")),
    ):
        (tmp_path / name).write_text(text)
    toml = lines(tmp_path / "a.toml")
    assert (toml["steps",], toml["mask", "rule"], toml["mask", "exclude"]) == (2, 6, 7)
    assert (toml["objective",], toml["objective", "views", "x"]) == (10, 12)
    assert lines(tmp_path / "a.yaml") == lines(tmp_path / "a.yml")
    assert (lines(tmp_path / "a.yml")["mask", "rule"], lines(tmp_path / "a.json")["mask", "rule"]) == (5, 5)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "steps = = 3", "line 1"),
        ("a.yaml", "a: 1\nb: [", "line 2"),
        ("a.yaml", "steps: 1\nsteps: 2", "given twice"),
        ("a.json", '{"steps": 1, "steps": 2}', "given twice"),
        ("a.yaml", "- 1", "contains no settings"),
        ("a.yaml", "!!python/object/apply:os.system [echo]", "could not determine a constructor"),
        ("a.json", "{", "Expecting"),
        ("a.json", "[" * 100_000, "recursion"),
        ("a.ini", "steps = 3", ".toml or .yaml"),
        ("a.toml", None, "No such file"),
        ("b.toml", b"\xff\xfe", "cannot be read"),
    ],
)
def test_files_that_cannot_be_understood(tmp_path: Path, name: str, text: str | bytes | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        read_config_file(tmp_path / name)
    assert said in str(error.value)
    assert name in str(error.value)


def test_nothing_is_a_file_without_settings(tmp_path: Path) -> None:
    for name in ("a.toml", "a.yaml"):
        (tmp_path / name).write_text("")
        assert read_config_file(tmp_path / name).values == {}


def test_aliases_that_lead_in_circles_are_no_trap(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a\n  b: *a\nlol: &l [x, x]\nmore: [*l, *l]\n")
    assert read_config_file(tmp_path / "a.yaml").lines["a", "b"] == 2
