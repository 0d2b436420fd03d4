"""The settings of an adaptation, and the presets: one for everyday use, and two that carry the paper.

`fast` helps within minutes, on any backbone, and knows whether it helped; docs/recipe.md has the why of every part.
The other two are SwAV over scores with plain SGD, as long as the paper's (150 epochs) unless told otherwise. They
differ where the paper's text and its released code do: how long prototypes stay frozen. All shares are of the run, so a
shorter run goes through the same phases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from .data.views import ViewsConfig
from .errors import ConfigError
from .masking import MaskConfig
from .objectives import ContrastConfig, SwAVConfig
from .run_config import RunConfig, changed, check_positive

ObjectiveName = Literal["contrast", "swav"]
_PAPER_STEPS = 117_188  # 150 epochs of 50,000 images in batches of 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptConfig(RunConfig):
    """Everything that decides what an adaptation learns; `preset` gives good ones.

    score_lr, head_lr, head_weight_decay: of the scores, and of projector and prototypes.
    per_tensor: a gradient counts in units of its tensor's usual one, and `score_lr` is how far all layers together move
        in the whole run: it is shared out among layers and steps, so that one setting fits every backbone and every
        length. (From the start of a score to its threshold it is a distance of 1.)
    heads_first: share of the run in which the heads learn alone.
    objective: "contrast" or "swav"; `contrast` and `swav` are their settings.
    views: of the views; it gives only the proportion of small crops to large ones, `size` the pixels.
    gate: hold some images out, measure on them whether the representation gets better, and keep the best point, which
        may be the start: the mask is then the identity.
    quality_every: steps between two such measurements.
    The rest is as in `RunConfig`.
    """

    score_lr: float = 50.0
    head_lr: float = 0.15
    head_weight_decay: float = 1e-6
    per_tensor: bool = False
    heads_first: float = 0.0
    objective: ObjectiveName = "swav"
    contrast: ContrastConfig = dataclasses.field(default_factory=ContrastConfig)
    views: ViewsConfig = dataclasses.field(default_factory=ViewsConfig)
    swav: SwAVConfig = dataclasses.field(default_factory=SwAVConfig)
    gate: bool = False
    quality_every: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "score_lr", "head_lr")
        if self.objective not in get_args(ObjectiveName):
            raise ConfigError("unknown objective", expected=", ".join(get_args(ObjectiveName)), found=self.objective)
        if not 0 <= self.heads_first < 1:
            raise ConfigError("heads_first is a share of the run", expected="0 to below 1", found=self.heads_first)
        if self.gate and (self.quality_every < 1 or self.quality_every % self.log_every):
            raise ConfigError("quality_every must be a multiple of log_every", found=self.quality_every)

    @staticmethod
    def preset(name: str, **changes: Any) -> AdaptConfig:
        """A preset, with some settings changed: `AdaptConfig.preset("fast", steps=300)`."""
        config: AdaptConfig = changed(PRESETS, name, changes)
        return config


PRESETS: Mapping[str, AdaptConfig] = {
    "fast": AdaptConfig(
        steps=120,
        objective="contrast",
        score_lr=30.0,
        per_tensor=True,
        head_lr=0.02,
        head_weight_decay=0.0,
        heads_first=0.05,
        views=ViewsConfig(small=0, large_scale=(0.6, 1.0), jitter=(0.4, 0.4, 0.4, 0.1), blur_p=0.0),
        mask=MaskConfig(norm="anchored"),
        gate=True,
    ),
    # SwAV's default: prototypes frozen for 313 steps.
    "paper": AdaptConfig(swav=SwAVConfig(freeze_prototypes=313 / _PAPER_STEPS)),
    # The code froze them for 5,005 steps.
    "reference": AdaptConfig(swav=SwAVConfig(freeze_prototypes=5005 / _PAPER_STEPS)),
}
