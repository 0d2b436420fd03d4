"""Every setting is an option, with its docstring as help; so are those of objectives and rules that others add."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from selfmask.cli import adapt, cascade, compare, pretrain, train
from selfmask.cli.options import Verb, settings_of
from selfmask.masking.rules import RULES
from selfmask.objectives import OBJECTIVES
from selfmask.settings import field_help, hints_of, kinds_of, part_of
from tests.cli.inside import selfmask
from tests.cli.small import SMALL, fine, kept, refused

VERBS = {module.VERB.name: module.VERB for module in (adapt, train, cascade, compare, pretrain)}


def fields(cls: type, path: tuple[str, ...] = ()) -> Iterator[tuple[str, type, str]]:
    """Every field of a config and of its parts, in all kinds: where it is, whose, and its name."""
    for name, hint in hints_of(cls).items():
        if (part := part_of(hint)) is None:
            yield ".".join((*path, name)), cls, name
            continue
        for kind in (kinds_of(part) or {"": part}).values():
            yield from fields(kind, (*path, name))


@pytest.mark.parametrize("name", VERBS)
def test_every_setting_is_an_option_or_said_not_to_be(name: str) -> None:
    verb = VERBS[name]
    reached = {".".join(path) for setting in settings_of(verb) for path in setting.paths}
    wanted = {path for path, _, _ in fields(verb.config)}
    assert wanted <= reached | set(verb.not_options)
    assert set(verb.not_options) <= wanted
    assert not reached & set(verb.not_options)
    assert all(verb.not_options.values())


@pytest.mark.parametrize("name", VERBS)
def test_every_setting_has_help(name: str) -> None:
    for path, cls, field in fields(VERBS[name].config):
        assert field_help(cls).get(field), path
    assert all(setting.help for setting in settings_of(VERBS[name]))


def test_names_that_are_taken_get_that_of_their_part() -> None:
    def options(verb: Verb, *own: str) -> dict[str, str]:
        found = settings_of(verb, own)
        assert len({setting.option for setting in found}) == len(found)
        return {setting.option: " ".join(".".join(path) for path in setting.paths) for setting in found}

    adapts = options(adapt.VERB)
    assert (adapts["--seed"], adapts["--mask-seed"]) == ("seed", "mask.seed")
    assert (adapts["--objective"], adapts["--temperature"]) == ("objective.name", "objective.temperature")
    cascades = options(cascade.VERB, "workers")
    assert (cascades["--adapt-workers"], cascades["--mask-seed"]) == ("adapt.workers", "adapt.mask.seed")
    compares = options(compare.VERB)
    assert compares["--batch-size"] == "train.batch_size adapt.batch_size"
    assert (compares["--steps"], compares["--adapt-steps"]) == ("train.steps", "adapt.steps")
    assert compares["--mask-seed"] == "train.mask.seed adapt.mask.seed"
    assert "--seed" not in compares


def test_help_has_everyday_options_first_and_the_rest_in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = fine(selfmask("adapt", "--help")).stdout
    order = ["--backbone", "--preset", "--out", "--steps", "--epochs", "--size", "--batch-size", "--seed", "--gate"]
    order += ["--resume", "--config", "--json", "─ Mask ", "--rule", "─ Objective ", "--prototypes", "─ Views "]
    order += ["--jitter", "─ Optimizer ", "--head-lr", "─ Running ", "--max-bad"]
    places = [words.index(f"│ {each}" if each.startswith("--") else each) for each in order]
    assert places == sorted(places)
    assert "fast: 240" in words
    assert "contrast: 0.2" in words
    assert "Number of prototypes, K. (swav)" in words


OBJECTIVE = '''
import dataclasses
from torch import nn
from selfmask.objectives import Health, Objective, ObjectiveConfig, register

@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TogetherConfig(ObjectiveConfig):
    """Views of an image belong together.

    strength: how hard they are pulled.
    width: of the projection.
    """

    name = "toy-together"
    strength: float = 1.0
    width: int = 8

    def build(self, context):
        return Together(context.features, self)

class Together(Objective):
    def __init__(self, features, config):
        super().__init__()
        self.config, self.head = config, nn.Linear(features, config.width)

    def loss(self, model, batch, progress):
        first, second = (self.head(model(view)) for view in batch[:2])
        return self.config.strength * (first - second).square().mean(), Health()
'''
RULE = '''
from selfmask.masking.rules import Rule, register_rule

@register_rule
class AboveMean(Rule):
    """All scores that are not below the mean."""

    name = "toy-mean"

    def write(self, scores, config, progress, out):
        out.copy_(scores >= scores.mean())
'''


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[None]:
    """An objective and a rule, a file each."""
    before = dict(OBJECTIVES), dict(RULES)
    for name, text in (("toy_objective", OBJECTIVE), ("toy_rule", RULE)):
        (tmp_path / f"{name}.py").write_text(text)
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    yield
    for known, old in zip((OBJECTIVES, RULES), before, strict=True):
        known.clear()  # type: ignore[attr-defined]
        known.update(old)  # type: ignore[attr-defined]
    for name in ("toy_objective", "toy_rule"):
        del sys.modules[name]


@pytest.mark.usefixtures("toys")
def test_an_objective_and_a_rule_are_a_file_each(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--objective", "toy-together", "--strength", "2", "--width", "4", "--rule", "toy-mean", "--small", "0")
    fine(selfmask("adapt", photos, *SMALL, *words, "--out", tmp_path / "run"))
    config = kept(tmp_path / "run")["config"]
    assert config["objective"] == {"name": "toy-together", "strength": 2.0, "width": 4}
    assert config["mask"]["rule"] == "toy-mean"
    refused(selfmask("adapt", photos, *SMALL, "--strength", "2", "--out", tmp_path / "x"), "toy-together has it")
    monkeypatch.setenv("COLUMNS", "200")
    shown = selfmask("cascade", "run", "--help").stdout
    assert "How hard they are pulled. (toy-together)" in shown
    assert "toy-mean" in shown
    fine(selfmask("adapt", "--resume", tmp_path / "run"))


def test_toys_are_put_away() -> None:
    assert not any("toy" in name for name in (*OBJECTIVES, *RULES))
    refused(selfmask("adapt", "photos", "--strength", "2"), "--strength")
