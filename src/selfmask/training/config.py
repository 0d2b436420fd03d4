"""The settings that every run has, whatever it learns."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from ..errors import ConfigError
from ..masking import MaskConfig
from ..settings import to_dict

Precision = Literal["auto", "float32", "bfloat16"]
_EPOCHS = 150  # of the paper, where neither steps nor epochs are given
_MOST_STEPS, _MOST_IMAGES, _LARGEST, _MOST_WORKERS = 10**9, 10**6, 4096, 256  # beyond, it was a slip of the finger
LENGTHS = ("steps", "epochs", "budget")
"""Settings of which each says how long a run is."""
ASIDE = ("checkpoint_every", "track", "workers")
"""Settings that do not decide what is learned, only how it is saved. (The gate looks where a line is logged.)"""
_TRACKED = ("tensorboard",) if importlib.util.find_spec("tensorboard") else ()
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Settings of the training loop, whatever it trains.

    momentum: momentum of SGD.
    warmup: share of the run in which learning rates rise linearly; they then follow a cosine to 0.
    accumulate: number of micro-batches that each batch is divided into, to save memory; their gradients are
        accumulated. SwAV assigns prototypes within each micro-batch, as if it were a batch of its own.
    precision: precision of the backbone's passes in training; auto means bfloat16 where that is faster (on a GPU that
        supports it, and on a CPU that does, for networks without grouped convolutions or mostly of linear layers),
        otherwise float32.
    compile: compile the model with torch.compile.
    sync_norm: with several processes, compute batch-norm statistics over all of them instead of per process.
    workers: number of processes that prepare views in advance; by default 0 on a CPU, where training uses all cores,
        otherwise up to 8.
    seed: seed for all randomness.
    log_every: number of steps between log lines.
    checkpoint_every: number of steps between checkpoints; one is also saved on Ctrl-C.
    """

    momentum: float = 0.9
    warmup: float = 0.0
    accumulate: int = 1
    precision: Precision = "auto"
    compile: bool = False
    sync_norm: bool = False
    workers: int | None = None
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        for name in ("accumulate", "log_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is out of range", expected="1 or more", found=getattr(self, name))
        for name, least, most in (("momentum", 0, 1), ("warmup", 0, 1), ("workers", 0, _MOST_WORKERS)):
            if (value := getattr(self, name)) is not None and not least <= value <= most:
                raise ConfigError(f"{name} is out of range", expected=f"{least} to {most}", found=value)
        if self.precision not in get_args(Precision):
            raise ConfigError("unknown precision", expected=", ".join(get_args(Precision)), found=self.precision)
        if self.checkpoint_every % self.log_every:
            raise ConfigError("checkpoint_every must be a multiple of log_every", found=self.checkpoint_every)
        if self.seed < 0:
            raise ConfigError("seed is out of range", expected="0 or more", found=self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(LoopConfig):
    """Settings that every run has, besides those of the training loop.

    steps: number of optimizer steps.
    epochs: number of passes over the images, instead of `steps`.
    budget: time that the run may take, such as 2m, 20m or 2h, instead of `steps`: how many steps fit is measured when
        it begins. If none of the three is given, 150 epochs as in the paper.
    batch_size: number of images per step, over all processes.
    size: height and width in pixels of large views and of evaluated images; by default the backbone's input size.
    lr: learning rate of the trained parameters; for the scores of a mask with `per_tensor`, the distance that a score
        with a typical gradient travels over the run.
    head_lr: learning rate of the heads: projector, prototypes, linear classifier.
    weight_decay: weight decay of heads and of fully trained weights; scores never decay.
    per_tensor: divide the gradient of each score tensor by its own recent root mean square, and distribute `lr` over
        the steps, so that one value fits every backbone. (By default, a score starts at a distance of 1 from its
        threshold.)
    mask: which weights carry a score, and how scores become a mask.
    track: where to log, besides log.jsonl: tensorboard, wandb, mlflow (the extra `tensorboard`, and for the others
        `track`); by default to TensorBoard, if it is installed.
    """

    steps: int | None = None
    epochs: float | None = None
    budget: str | None = None
    batch_size: int = 64
    size: int | None = None
    lr: float | None = None
    head_lr: float = 0.15
    weight_decay: float = 0.0
    per_tensor: bool = False
    mask: MaskConfig = dataclasses.field(default_factory=MaskConfig)
    track: tuple[str, ...] = _TRACKED

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {name: getattr(self, name) for name in LENGTHS if getattr(self, name) is not None}
        if len(given) > 1:
            found = ", ".join(f"{name} {value}" for name, value in given.items())
            raise ConfigError("give one of steps, epochs and budget", found=found)
        if self.budget is not None:
            seconds_of(self.budget)
        for name, least, most in (("steps", 1, _MOST_STEPS), ("batch_size", 2, _MOST_IMAGES), ("size", 8, _LARGEST)):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} is out of range", expected=f"{least} to {most:,}", found=value)
        for name, limit in (("epochs", _MOST_STEPS), ("lr", math.inf), ("head_lr", math.inf)):
            if (value := getattr(self, name)) is not None and not 0 < value < limit:
                raise ConfigError(f"{name} is out of range", expected="a number above 0", found=value)
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise ConfigError("weight_decay is out of range", expected="0 or more", found=self.weight_decay)

    def number_of_steps(self, steps_per_epoch: int) -> int:
        if self.steps is not None:
            return self.steps
        return max(1, round((self.epochs or _EPOCHS) * steps_per_epoch))

    def changed(self, **changes: Any) -> Self:
        """With some settings changed; of steps, epochs and budget each takes the place of the others."""
        if any(changes.get(name) is not None for name in LENGTHS):
            changes = {**dict.fromkeys(LENGTHS), **changes}
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, ready for JSON."""
        return to_dict(self)


def seconds_of(text: str) -> float:
    """The seconds that a time such as 90s, 20m, 1.5h or 1h30m stands for."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if "".join(map("".join, parts)) != text or not 0 < seconds < math.inf:
        raise ConfigError("a budget is not a time", expected="such as 90s, 2m, 20m, 1.5h or 1h30m", found=repr(text))
    return seconds


def preset_named(presets: Mapping[str, Any], name: str) -> Any:
    if name not in presets:
        raise ConfigError(f"there is no preset {name!r}", expected=" or ".join(presets))
    return presets[name]
