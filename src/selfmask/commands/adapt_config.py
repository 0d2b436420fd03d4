"""The settings of `adapt`, and its presets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from torch import nn

from ..data.views import ViewsConfig
from ..errors import ConfigError
from ..masking import MaskConfig
from ..objectives import ObjectiveConfig, objective_named
from ..objectives.neighbours import NeighboursConfig
from ..objectives.swav import SwAVConfig
from ..settings import to_dict
from ..training.config import LENGTHS, RunConfig, preset_named
from ..training.methods import Follow
from ..training.precision import mostly_linear

AdaptMethod = Literal["mask", "full", "lora", "bitfit"]

_STEPS = 240  # of `fast`
_DISTANCE = 6.0  # of scores in so many steps
_OF_LINEAR = 0.25  # of it: no batch norm takes back what flips do to the means and sizes of what layer norms see
_LOOK_EVERY, _LOOKS = 60, 10  # steps; and times in a long run
_PAPER_MASK = MaskConfig(select="paper", alpha_of="projection")
_PAPER_STEPS = 117_188  # 150 epochs of 50,000 images in batches of 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptConfig(RunConfig):
    """All settings of an adaptation; `AdaptConfig.preset` returns tested ones.

    method: what to train: mask (scores of the weights), full (all weights), lora (low-rank matrices added to the
        weights that a mask would select) or bitfit (biases and norm layers).
    lr: learning rate of what the method trains; for a mask with `per_tensor`, the distance that a score with a
        typical gradient travels over the run; in runs of more than 240 steps, it grows with the root of their number,
        and in networks mostly of linear layers, such as transformers, it is a quarter.
        Every method has a default of its own.
    rank: rank of the LoRA matrices.
    follow: full fine-tuning as we do it (all weights, at a rate chosen by measurement) or as in the paper (the weights
        that a mask would select, at a rate of 0.15).
    most_images: number of images to learn from at most; of a larger set, a random sample is taken, and nothing else is
        read.
    heads_first: share of the run, at the start, in which only the heads are trained.
    objective: training objective.
    views: augmented views of each image; by default those that suit the objective. Here `size` only sets the ratio of
        small crops to large ones.
    gate: measure on held-out images whether the representation improves, and keep the last point that is proven better
        than the frozen backbone, unless an earlier one is proven better still; if none is, the result is the frozen
        backbone.
    quality_every: number of steps between measurements of quality on the held-out images; by default 60, or a tenth of
        a longer run: every look is a chance to take luck for a gain, and many raise the bar for each.
    """

    method: AdaptMethod = "mask"
    lr: float = None  # type: ignore[assignment]  # depends on the method
    rank: int = 8
    follow: Follow = "ours"
    weight_decay: float = 1e-6
    most_images: int | None = None
    heads_first: float = 0.0
    objective: ObjectiveConfig = dataclasses.field(default_factory=SwAVConfig)
    views: ViewsConfig | None = None
    gate: bool = False
    quality_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in get_args(AdaptMethod):
            raise ConfigError("unknown method", expected=", ".join(get_args(AdaptMethod)), found=self.method)
        if self.follow not in get_args(Follow):
            raise ConfigError("unknown follow", expected=" or ".join(get_args(Follow)), found=self.follow)
        if self.lr is None:
            rates = _RATES | ({"full": _PAPER_RATE} if self.follow == "paper" else {})
            own = _DISTANCE if self.method == "mask" and self.per_tensor else rates[self.method]
            object.__setattr__(self, "lr", own)
        if self.rank < 1:
            raise ConfigError("rank is out of range", expected="1 or more", found=self.rank)
        if isinstance(self.objective, str):
            object.__setattr__(self, "objective", objective_named(self.objective))
        if self.most_images is not None and self.most_images < 2:
            raise ConfigError("most_images is out of range", expected="2 or more", found=self.most_images)
        if not 0 <= self.heads_first < 1:
            raise ConfigError(
                "heads_first is out of range", expected="a share of the run, from 0 to below 1", found=self.heads_first
            )
        if self.quality_every is not None and (self.quality_every < 1 or self.quality_every % self.log_every):
            raise ConfigError("quality_every must be a multiple of log_every", found=self.quality_every)

    @staticmethod
    def preset(name: str, **changes: Any) -> AdaptConfig:
        """A preset, with some settings changed: `AdaptConfig.preset("fast", steps=300)`."""
        config: AdaptConfig = preset_named(PRESETS, name)
        return config.changed(**changes)

    def changed(self, **changes: Any) -> Self:
        """With some settings changed; another method has another learning rate, unless that is said too."""
        if changes.get("method", self.method) != self.method:
            changes = {"lr": None, **changes}
        before, after = self.objective, changes.get("objective", self.objective)
        another = any(changes.get(name) is not None for name in LENGTHS)
        if another and isinstance(before, SwAVConfig) and isinstance(after, SwAVConfig):
            kept = None if after.freeze_steps == before.freeze_steps else after.freeze_steps
            changes = {**changes, "objective": dataclasses.replace(after, freeze_steps=kept)}
        return super().changed(**changes)

    def rate(self, steps: int, model: nn.Module) -> float:
        """`lr` in a run of so many steps, of this network."""
        if not self.per_tensor:
            return self.lr
        # Gradients differ in sign from step to step: scores that walk at random get as far as the root of the steps.
        own = _OF_LINEAR if mostly_linear(model) else 1.0
        return self.lr * own * math.sqrt(max(1.0, steps / _STEPS))

    def look_every(self, steps: int) -> int:
        """Number of steps between measurements of quality, in a run of so many."""
        if self.quality_every is not None:
            return self.quality_every
        return self.log_every * math.ceil(max(_LOOK_EVERY, steps / _LOOKS) / self.log_every)

    @property
    def chosen_views(self) -> ViewsConfig:
        return self.objective.views if self.views is None else self.views

    def suggested(self, part: str) -> ViewsConfig:
        """What `views` would be, were only some of it given."""
        assert part == "views"
        return self.chosen_views

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "views": to_dict(self.chosen_views)}


# Of a mask, the paper's, without `per_tensor`; the others were chosen on the bundled pair: docs/rivals.md.
_RATES: dict[str, float] = {"mask": 50.0, "full": 0.02, "lora": 0.2, "bitfit": 0.1}
_PAPER_RATE = 0.15  # of full fine-tuning: SwAV's own, 0.6, for batches of 64 instead of 256

# `fast` helps within minutes, on any backbone, and knows whether it helped; docs/recipe.md has the why of every part.
# The other two are SwAV over scores with plain SGD, as long as the paper's (150 epochs) unless told otherwise. They
# differ where the paper's text and its released code do: how long prototypes stay frozen. That is a number of steps; in
# a run of another length it is a share, that of the paper's longest run: a shorter one goes through the same phases.
PRESETS: Mapping[str, AdaptConfig] = {
    "fast": AdaptConfig(
        steps=_STEPS,
        most_images=20_000,
        objective=NeighboursConfig(),
        per_tensor=True,
        head_lr=0.02,
        weight_decay=0.0,
        heads_first=0.05,
        mask=MaskConfig(norm="anchored", select="late"),
        gate=True,
    ),
    # SwAV's default: prototypes frozen for 313 steps.
    "paper": AdaptConfig(
        objective=SwAVConfig(freeze_prototypes=313 / _PAPER_STEPS, freeze_steps=313), mask=_PAPER_MASK, follow="paper"
    ),
    # The code froze them for 5,005 steps.
    "reference": AdaptConfig(
        objective=SwAVConfig(freeze_prototypes=5005 / _PAPER_STEPS, freeze_steps=5005), mask=_PAPER_MASK, follow="paper"
    ),
}
