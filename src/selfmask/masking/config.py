"""What is masked, and by which rule: one validated, immutable description of a mask."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, get_args

from ..errors import ConfigError
from .rules import RULES, ScoreInit

FractionBy = Literal["random", "magnitude"]
NormPolicy = Literal["adapt", "frozen", "recalibrate", "anchored"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Which weights carry a score, and how scores become a mask.

    rule: how scores become a mask: threshold (m = [s > mu], as in the paper), topk (the `active_share` highest scores
        of each tensor) or progressive_topk (top-k with a share that falls from 1 to `active_share` during training).
    mu: threshold of the scores. The paper proves that tuning the learning rate makes tuning this and `s0` unnecessary.
    s0: initial value of the scores.
    active_share: share of active weights under the top-k rules.
    share_every: when the share of progressive_topk falls: step, or epoch as in the paper.
    score_init: initialisation of the scores: constant (`s0`) or kaiming; by default constant for threshold, kaiming for
        the top-k rules.
    select: parameters to mask: auto, late (auto without the first quarter of the layers), paper (paper-resnet or
        paper-vit, as the network is), paper-resnet, paper-vit, reference-vit (and CLIP's projection), all, stages:A-B
        (0 is the stem), or glob patterns of parameter names.
    exclude: glob patterns of parameter names to leave unmasked.
    fraction: share of each tensor's weights that carry a score; the others stay active and take no storage.
    fraction_by: how the weights that carry a score are chosen if `fraction` is below 1: random (by the mask's seed) or
        magnitude (the largest).
    seed: seed for the random choice of weights and for Kaiming initialisation.
    alpha_of: what has a rescaling factor alpha of its own: tensor, or projection (queries, keys and values in one
        tensor count as three, as they do where a network keeps them apart).
    detach_alpha: ignore the rescaling factor alpha in the gradient; by default the gradient is the total derivative
        dL/dM.
    norm: handling of batch-norm statistics: adapt (updated in train mode), frozen, recalibrate (as adapt, then
        re-estimated at the end by `MaskedModel.recalibrate`) or anchored (they follow the effect of the mask but not
        the shift in images; see `MaskedModel.anchor`).
    """

    rule: str = dataclasses.field(default="threshold", metadata={"choices": RULES})
    mu: float = 0.0
    s0: float = 1.0
    active_share: float = 0.5
    share_every: Literal["step", "epoch"] = "step"
    score_init: ScoreInit | None = None
    select: str | Sequence[str] = "auto"
    exclude: Sequence[str] = ()
    fraction: float = 1.0
    fraction_by: FractionBy = "random"
    seed: int = 0
    alpha_of: Literal["tensor", "projection"] = "tensor"
    detach_alpha: bool = False
    norm: NormPolicy = "adapt"

    def __post_init__(self) -> None:
        _one_of("rule", self.rule, list(RULES))
        _one_of("fraction_by", self.fraction_by, get_args(FractionBy))
        _one_of("norm", self.norm, get_args(NormPolicy))
        _one_of("alpha_of", self.alpha_of, ("tensor", "projection"))
        _one_of("share_every", self.share_every, ("step", "epoch"))
        if self.score_init is None:
            object.__setattr__(self, "score_init", RULES[self.rule].score_init)
        _one_of("score_init", self.score_init, get_args(ScoreInit))
        _between("active_share", self.active_share, 0.0, 1.0)
        _between("fraction", self.fraction, 0.0, 1.0)
        if self.fraction == 0:
            raise ConfigError("fraction 0 leaves nothing to mask", expected="above 0, at most 1", found=self.fraction)
        for name in ("mu", "s0"):
            value = getattr(self, name)
            if not (_is_number(value) and abs(value) <= sys.float_info.max):  # false for NaN, and for huge integers
                raise ConfigError(f"{name} must be a finite number", found=repr(value))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConfigError("seed must be a whole number from 0 to 2^63 - 1", found=repr(self.seed))
        # Tuples, so that equal configs compare equal and nothing can be changed behind our back.
        if not isinstance(self.select, str):
            object.__setattr__(self, "select", _patterns("select", self.select))
        object.__setattr__(self, "exclude", _patterns("exclude", self.exclude))

    def changed(self, **changes: Any) -> Self:
        """With some settings changed; scores then start as suits the rule, unless that is said too."""
        if changes.get("rule", self.rule) != self.rule:
            changes = {"score_init": None, **changes}
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; `from_dict` takes them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MaskConfig:
        """The inverse of `to_dict`; unknown names are refused, so that no setting is dropped in silence."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := set(values) - known:
            raise ConfigError("unknown mask settings", expected=sorted(known), found=sorted(map(str, unknown)))
        return cls(**values)


def _one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"unknown {name}", expected=", ".join(allowed), found=repr(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _between(name: str, value: float, low: float, high: float) -> None:
    if not (_is_number(value) and low <= value <= high):
        raise ConfigError(f"{name} is out of range", expected=f"{low} to {high}", found=repr(value))


def _patterns(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ConfigError(f"{name} must be a list of glob patterns", found=repr(value))
    if not all(isinstance(pattern, str) for pattern in value):
        raise ConfigError(f"{name} must contain only text patterns", found=repr(value))
    return tuple(value)
