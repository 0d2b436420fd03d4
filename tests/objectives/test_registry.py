"""An objective of one's own: a config and a loss, known by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from selfmask import adapt
from selfmask.commands.adapt import AdaptResult
from selfmask.errors import ConfigError
from selfmask.objectives import OBJECTIVES, Context, Health, Objective, ObjectiveConfig, objective_named, register

from ..training.small import HOW, Clothes, config, network


class Toy(Objective):
    """Brings two views of an image together, on average; counts its hooks."""

    heads = ("layer",)

    def __init__(self, features: int, pull: float) -> None:
        super().__init__()
        self.layer, self.pull, self.calls = nn.Linear(features, 4), pull, list[str]()

    def loss(self, model: nn.Module, batch: Any, progress: float) -> tuple[Tensor, Health]:
        self.calls.append("loss")
        one, other = (self.layer(model(view)) for view in batch[:2])
        return self.pull * (one - other).square().mean(), Health(more={"progress": progress})

    def before_step(self, model: nn.Module, progress: float) -> None:
        self.calls.append("before")

    def after_backward(self, model: nn.Module, progress: float) -> None:
        self.calls.append("backward")

    def after_step(self, model: nn.Module, progress: float) -> None:
        self.calls.append("after")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig(ObjectiveConfig):
    """Of a toy.

    pull: how strongly views are pulled together.
    """

    name = "toy"
    pull: float = 1.0
    built: ClassVar[list[Toy]] = []

    def build(self, context: Context) -> Toy:
        torch.manual_seed(context.seed % 2**32)
        self.built.append(Toy(context.features, self.pull))
        return self.built[-1]


@pytest.fixture(autouse=True)
def _toy() -> Iterator[None]:
    register(ToyConfig)
    yield
    del OBJECTIVES["toy"]
    ToyConfig.built.clear()


def run(objective: Any, **changes: Any) -> AdaptResult:
    return adapt(network(), Clothes(), config(objective=objective, steps=4, **changes), preprocessing=HOW)


def test_it_is_trained_by_its_name() -> None:
    result = run("toy")
    (toy,) = ToyConfig.built
    assert toy.calls == ["before", "loss", "backward", "after"] * 4
    assert [line["progress"] for line in result.log] == [0, 0.25, 0.5, 0.75]
    assert result.model.sparsity()["total"] < 1


def test_its_settings_count() -> None:
    losses = [run(ToyConfig(pull=pull)).log[0]["loss"] for pull in (1.0, 2.0)]
    assert losses[1] == pytest.approx(2 * losses[0])
    assert objective_named("toy", pull=3.0) == ToyConfig(pull=3.0)
    assert config(objective=ToyConfig(pull=2.0)).to_dict()["objective"] == {"name": "toy", "pull": 2.0}


def test_a_step_in_parts_calls_the_loss_for_each() -> None:
    run("toy", accumulate=2)
    assert ToyConfig.built[-1].calls == ["before", "loss", "loss", "backward", "after"] * 4


def test_two_of_a_name_are_refused() -> None:
    register(ToyConfig)  # the same one again is no harm

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Other(ToyConfig):
        pass

    with pytest.raises(ConfigError, match="two objectives named 'toy'"):
        register(Other)
    assert OBJECTIVES["toy"] is ToyConfig


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"unknown objective[\s\S]*doggo") as error:
        objective_named("doggo")
    assert all(name in str(error.value) for name in ("swav", "contrast", "dino", "toy"))
    with pytest.raises(ConfigError, match="doggo"):
        config(objective="doggo")
