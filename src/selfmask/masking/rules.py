"""Rules: how scores become masks. Each is a small class under the name that `--rule` takes.

A new rule is one file that defines one with `@register_rule`: in this folder, or in another package that names it as an
entry point of the group "selfmask.rules".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.metadata import entry_points
from typing import ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import ConfigError

ScoreInit = Literal["constant", "kaiming"]


class RuleSettings(Protocol):
    """The settings that rules look at: those of `MaskConfig`."""

    @property
    def rule(self) -> str: ...

    @property
    def mu(self) -> float: ...

    @property
    def active_share(self) -> float: ...


class Rule(ABC):
    """Turns the scores of one tensor into its mask."""

    name: ClassVar[str]
    score_init: ClassVar[ScoreInit] = "constant"
    """How scores start, where the config does not say."""

    @abstractmethod
    def write(self, scores: Tensor, config: RuleSettings, progress: float, out: Tensor) -> None:
        """Write the mask M of `scores` as zeros and ones into `out`, which has their shape, in the weight's dtype.

        `progress` in [0, 1] is how far training has come.
        """


RULES: dict[str, Rule] = {}
T = TypeVar("T", bound=Rule)


def register_rule(rule: type[T]) -> type[T]:
    """Make a rule known by its name."""
    if type(RULES.setdefault(rule.name, rule())) is not rule:
        raise ConfigError(f"there are two rules named {rule.name!r}")
    return rule


@register_rule
class Threshold(Rule):
    """M = [S > mu]: the paper."""

    name = "threshold"

    def write(self, scores: Tensor, config: RuleSettings, progress: float, out: Tensor) -> None:
        torch.gt(scores, config.mu, out=out)


@register_rule
class TopK(Rule):
    """The `active_share` highest scores of each tensor (Ramanujan)."""

    name = "topk"
    score_init = "kaiming"

    def write(self, scores: Tensor, config: RuleSettings, progress: float, out: Tensor) -> None:
        out.copy_(top_share(scores.flatten(), config.active_share).view_as(scores))


@register_rule
class ProgressiveTopK(Rule):
    """Top-k whose share falls from 1 to `active_share` as training progresses."""

    name = "progressive_topk"
    score_init = "kaiming"

    def write(self, scores: Tensor, config: RuleSettings, progress: float, out: Tensor) -> None:
        share = 1 + (config.active_share - 1) * progress
        out.copy_(top_share(scores.flatten(), share).view_as(scores))


def write_mask(scores: Tensor, config: RuleSettings, progress: float, chosen: Tensor | None, out: Tensor) -> None:
    """Write the mask M of `scores` as zeros and ones into `out`, which has the weight's shape and dtype.

    Weights that are not `chosen` stay on whatever their score, so that not even weight decay can switch them off.
    """
    rule = RULES[config.rule]
    if chosen is None:
        rule.write(scores, config, progress, out)
        return
    own = scores[chosen]
    of_chosen = torch.empty_like(own, dtype=out.dtype)
    rule.write(own, config, progress, of_chosen)
    out.fill_(1)
    out[chosen] = of_chosen


def top_share(scores: Tensor, share: float) -> Tensor:
    """The round(share * n) highest of the n scores as a bool vector; among equals the first ones win."""
    n = scores.numel()
    k = round(share * n)
    if k == 0 or k == n:
        return torch.full_like(scores, k > 0, dtype=torch.bool)
    cut = torch.kthvalue(scores, n - k + 1).values
    keep = scores > cut
    ties = torch.nonzero(scores == cut).flatten()
    keep[ties[: k - int(keep.sum())]] = True
    return keep


for _point in entry_points(group="selfmask.rules"):
    _point.load()
