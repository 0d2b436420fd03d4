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
from .training import LoopConfig
from .training.loop import Precision

ObjectiveName = Literal["contrast", "swav"]
_ASIDE = ("log_every", "checkpoint_every", "track", "workers")
_PAPER_STEPS = 117_188  # 150 epochs of 50,000 images in batches of 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """Everything that decides what an adaptation learns; `preset` gives good ones.

    steps, epochs: how long; give one of them, or neither for 150 epochs.
    size: of a large crop and of evaluated images, in pixels; the backbone's own by default. `views` gives only the
        proportion of small crops to large ones.
    score_lr, head_lr, head_weight_decay: of the scores, and of projector and prototypes.
    per_tensor: a gradient counts in units of its tensor's usual one, and `score_lr` is how far all layers together move
        in the whole run: it is shared out among layers and steps, so that one setting fits every backbone and every
        length. (From the start of a score to its threshold it is a distance of 1.)
    heads_first: share of the run in which the heads learn alone.
    objective: "contrast" or "swav"; `contrast` and `swav` are their settings.
    views, mask: of the views and of the mask.
    gate: hold some images out, measure on them whether the representation gets better, and keep the best point, which
        may be the start: the mask is then the identity.
    quality_every: steps between two such measurements.
    track: where the log goes besides log.jsonl: "tensorboard", "wandb", "mlflow" (the last two by extra).
    The rest is as in `LoopConfig`.
    """

    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 64
    size: int | None = None
    score_lr: float = 50.0
    head_lr: float = 0.15
    head_weight_decay: float = 1e-6
    momentum: float = 0.9
    per_tensor: bool = False
    heads_first: float = 0.0
    objective: ObjectiveName = "swav"
    contrast: ContrastConfig = dataclasses.field(default_factory=ContrastConfig)
    views: ViewsConfig = dataclasses.field(default_factory=ViewsConfig)
    swav: SwAVConfig = dataclasses.field(default_factory=SwAVConfig)
    mask: MaskConfig = dataclasses.field(default_factory=MaskConfig)
    gate: bool = False
    quality_every: int = 40
    accumulate: int = 1
    precision: Precision = "auto"
    compile: bool = False
    sync_norm: bool = False
    workers: int | None = None
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 50
    track: tuple[str, ...] = ("tensorboard",)

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ConfigError("give steps or epochs, not both", found=f"{self.steps} steps and {self.epochs} epochs")
        for name, least in (("steps", 1), ("batch_size", 2), ("size", 8)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is out of range", expected=f"{least} or more", found=value)
        if self.epochs is not None and not self.epochs > 0:
            raise ConfigError("epochs is out of range", expected="above 0", found=self.epochs)
        for name in ("score_lr", "head_lr"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is out of range", expected="above 0", found=getattr(self, name))
        if self.objective not in get_args(ObjectiveName):
            raise ConfigError("unknown objective", expected=", ".join(get_args(ObjectiveName)), found=self.objective)
        if not 0 <= self.heads_first < 1:
            raise ConfigError("heads_first is a share of the run", expected="0 to below 1", found=self.heads_first)
        if self.gate and (self.quality_every < 1 or self.quality_every % self.log_every):
            raise ConfigError("quality_every must be a multiple of log_every", found=self.quality_every)

    @staticmethod
    def preset(name: str, **changes: Any) -> AdaptConfig:
        """A preset, with some settings changed: `AdaptConfig.preset("fast", steps=300)`."""
        if name not in PRESETS:
            raise ConfigError(f"there is no preset {name!r}", expected=" or ".join(PRESETS))
        if changes.get("epochs") is not None:
            changes = {"steps": None, **changes}  # instead of the preset's own
        return dataclasses.replace(PRESETS[name], **changes)

    def number_of_steps(self, steps_per_epoch: int) -> int:
        if self.steps is not None:
            return self.steps
        return max(1, round((self.epochs or 150) * steps_per_epoch))

    def loop(self, steps: int) -> LoopConfig:
        """The part of it that is the loop's."""
        names = {field.name for field in dataclasses.fields(LoopConfig)} & {f.name for f in dataclasses.fields(self)}
        return LoopConfig(**{name: getattr(self, name) for name in names - {"steps"}}, steps=steps)

    def to_dict(self) -> dict[str, Any]:
        """The settings that decide what is learned; how it is logged and saved does not."""
        settings = {**dataclasses.asdict(self), "mask": self.mask.to_dict()}
        return {key: value for key, value in settings.items() if key not in _ASIDE}


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
