"""The settings that every run has, whatever it learns."""

from __future__ import annotations

import dataclasses
from typing import Any

from .errors import ConfigError
from .masking import MaskConfig
from .training import LoopConfig
from .training.loop import Precision

_ASIDE = ("log_every", "checkpoint_every", "track", "workers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What an adaptation and a supervised run have in common.

    steps, epochs: how long; give one of them, or neither for 150 epochs.
    size: of a large crop and of evaluated images, in pixels; the backbone's own by default.
    mask: of the mask.
    track: where the log goes besides log.jsonl: "tensorboard", "wandb", "mlflow" (the last two by extra).
    The rest is as in `LoopConfig`.
    """

    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 64
    size: int | None = None
    momentum: float = 0.9
    mask: MaskConfig = dataclasses.field(default_factory=MaskConfig)
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
        for name, least in (("steps", 1), ("batch_size", 2), ("size", 8), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is out of range", expected=f"{least} or more", found=value)
        if self.epochs is not None and not self.epochs > 0:
            raise ConfigError("epochs is out of range", expected="above 0", found=self.epochs)

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


def check_positive(config: RunConfig, *names: str) -> None:
    for name in names:
        if (value := getattr(config, name)) is not None and not value > 0:
            raise ConfigError(f"{name} is out of range", expected="above 0", found=value)


def changed(presets: Any, name: str, changes: dict[str, Any]) -> Any:
    """The preset of that name, with some settings changed."""
    if name not in presets:
        raise ConfigError(f"there is no preset {name!r}", expected=" or ".join(presets))
    for given, other in (("epochs", "steps"), ("steps", "epochs")):
        if changes.get(given) is not None:
            changes = {other: None, **changes}  # instead of the preset's own
    return dataclasses.replace(presets[name], **changes)
