"""What an objective is: a loss with trainable heads of its own, and a config that knows how to build it.

A new objective is one file in this folder: a config dataclass with `@register`, whose `build` makes the `Objective`.
It is then a choice of `--objective`, and its settings are options of the command line.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from ..data.views import ViewsConfig
from ..errors import ConfigError
from ..files import LogKey

Number = float | Tensor


@dataclasses.dataclass(frozen=True)
class Health:
    """What tells a run that learns from one that does not. Every part may be missing.

    guess: the loss of a guess, ln K for K equally likely answers; a run whose loss stays there learns nothing.
    spread: 1 - |mean|^2 of the unit vectors of a batch; near 0, all images have become alike.
    more: other numbers worth logging.
    """

    guess: Number | None = None
    spread: Number | None = None
    more: Mapping[str, Number] = dataclasses.field(default_factory=dict)

    def numbers(self) -> dict[str, Number]:
        """As columns of the log; `of_line` takes them back."""
        known = {LogKey.GUESS: self.guess, LogKey.SPREAD: self.spread}
        return {**{name: value for name, value in known.items() if value is not None}, **self.more}

    @staticmethod
    def of_line(line: Mapping[str, Any]) -> Health:
        """The health that a line of the log tells of."""
        return Health(line.get(LogKey.GUESS), line.get(LogKey.SPREAD))


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Objective(nn.Module, ABC):
    """A loss with its own trainable heads. Heads and any other state of training live in its `state_dict`.

    One optimizer step is: `before_step`, then `loss` and backward once per micro-batch, `after_backward`, the
    optimizer, `after_step`. `model` maps images to vectors; `progress` is the share of the run that is done, from 0 to
    below 1. The model must not become a submodule: a checkpoint would then hold the frozen base.
    """

    heads: ClassVar[Sequence[str]] = ()
    """The submodules that another run with the same objective can start from."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, progress: float) -> tuple[Tensor, Health]:
        """The loss of `model` on one batch, and how healthy it looks."""

    def before_step(self, model: nn.Module, progress: float) -> None:
        """Called before the forward pass of each optimizer step."""

    def after_backward(self, model: nn.Module, progress: float) -> None:
        """Called when the gradients of a step are complete, before the optimizer uses them."""

    def after_step(self, model: nn.Module, progress: float) -> None:
        """Called when the optimizer has changed the parameters."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What an objective is built for.

    model: what learns, as the training loop runs it: a `MaskedModel`, or a plain network.
    features: the length of its vectors.
    large_crops: how many views of each image are large; they come first in a batch.
    seed: for heads that start at random.
    frozen: features of the frozen backbone, without gradient.
    reference: some batches of views that stand for what is trained on.
    steps: the length of the run.
    frozen_vectors: the frozen backbone's features of all images that are trained on, in the order of their numbers.
    vectors: those of the model as it is now, as it would be used.
    frozen_layout: `frozen_vectors`, and what a stage before the last sees where (`training/layout.py`), [images,
        numbers]; None where the backbone has no such stage.
    """

    model: nn.Module
    features: int
    large_crops: int
    seed: int
    frozen: Callable[[Tensor], Tensor]
    reference: Callable[[], list[Tensor]]
    steps: int
    frozen_vectors: Callable[[], Tensor]
    vectors: Callable[[], Tensor]
    frozen_layout: Callable[[], tuple[Tensor, Tensor | None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(ABC):
    """The settings of an objective, under the name that `--objective` takes."""

    name: ClassVar[str]
    views: ClassVar[ViewsConfig] = ViewsConfig()
    """The views that suit it, where the user does not say."""
    numbered: ClassVar[bool] = False
    """Whether its batches are pairs of views and of the numbers of their images among those trained on."""

    @abstractmethod
    def build(self, context: Context) -> Objective: ...

    # For `__post_init__`: what a setting must be, by its name.

    def check_whole(self, **least: int) -> None:
        """Whole numbers, each with the least that it may be."""
        for name, lowest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ConfigError(f"{name} is out of range", expected=f"a whole number, {lowest} or more", found=value)

    def check_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < math.inf:
                raise ConfigError(f"{name} is out of range", expected="a number above 0", found=value)

    def check_share(self, *names: str, of: str = "of the run, ") -> None:
        for name in names:
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= 1:
                raise ConfigError(f"{name} is out of range", expected=f"a share {of}from 0 to 1", found=value)

    @classmethod
    def kinds(cls) -> Mapping[str, type[ObjectiveConfig]]:
        """All objectives there are, by name."""
        return OBJECTIVES


OBJECTIVES: dict[str, type[ObjectiveConfig]] = {}
T = TypeVar("T", bound=ObjectiveConfig)


def register(config: type[T]) -> type[T]:
    """Make an objective known by its name."""
    if OBJECTIVES.setdefault(config.name, config) is not config:
        raise ConfigError(f"there are two objectives named {config.name!r}")
    return config


def objective_named(name: str, **settings: Any) -> ObjectiveConfig:
    """The config of an objective, with some settings changed."""
    if name not in OBJECTIVES:
        raise ConfigError("unknown objective", expected=", ".join(OBJECTIVES), found=name)
    return OBJECTIVES[name](**settings)
