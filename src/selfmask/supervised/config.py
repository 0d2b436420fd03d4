"""The settings of a supervised run, and its presets: what is trained, from which labels, how fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from ..data.views import ViewsConfig
from ..errors import ConfigError
from ..masking import MaskConfig
from ..run_config import RunConfig, changed, check_positive

MethodName = Literal["mask", "full", "linear", "lora", "bitfit"]
HeadName = Literal["linear", "masked", "clip-text"]
ONE_VIEW = ViewsConfig(large=1, small=0, blur_p=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Everything that decides what a supervised run learns; `preset` gives good ones.

    method: what learns: "mask" (scores of weights), "full" (all weights), "linear" (the head alone), "lora" (low-rank
        matrices beside the weights that a mask would select) or "bitfit" (biases and norm layers).
    head: "linear" (trained), "masked" (a frozen random one with a mask) or "clip-text" (CLIP's, from class names).
    head_start: where a linear head begins: "probe" (the linear probe of the frozen backbone) or "random".
    label_fraction, stratified: which share of the training labels is used, of every class alike or of all at random.
    lr, weight_decay: of what the method trains; None: by method, as the preset has it. head_lr: of a linear head.
    per_tensor: for masks, as in `AdaptConfig`: `lr` is then the distance that scores travel in the whole run.
    warmup: share of the run in which rates rise linearly.
    rank: of the matrices of "lora".
    views: what is made of a training image; `size` gives the pixels.
    The rest is as in `RunConfig`.
    """

    method: MethodName = "mask"
    head: HeadName = "linear"
    head_start: Literal["probe", "random"] = "random"
    label_fraction: float = 1.0
    stratified: bool = True
    lr: float | None = None
    head_lr: float = 0.1
    weight_decay: float = 0.0
    per_tensor: bool = False
    warmup: float = 0.0
    rank: int = 8
    views: ViewsConfig = ONE_VIEW

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "lr", "head_lr", "rank")
        for name, allowed in (("method", MethodName), ("head", HeadName)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(f"unknown {name}", expected=", ".join(get_args(allowed)), found=getattr(self, name))
        if not 0 < self.label_fraction <= 1:
            raise ConfigError("no such share of labels", expected="above 0, at most 1", found=self.label_fraction)
        if self.method == "linear" and self.head != "linear":
            raise ConfigError(
                "the method linear trains nothing but a linear head", found=self.head, todo="--head linear"
            )
        if self.head == "masked" and self.method != "mask":
            raise ConfigError("a masked head goes with a mask", found=self.method, todo="--head linear")

    @property
    def rate(self) -> float:
        """The learning rate of what the method trains; with the method linear, that is the head."""
        if self.lr is not None:
            return self.lr
        if self.method == "linear":
            return self.head_lr
        if self.head == "clip-text" and self.method == "mask" and not self.per_tensor:
            return _CLIP_RATE
        return _RATES[self.per_tensor][self.method]

    @staticmethod
    def preset(name: str, **changes: Any) -> TrainConfig:
        """A preset, with some settings changed: `TrainConfig.preset("fast", method="full")`."""
        config: TrainConfig = changed(_PAPER_CLIP if changes.get("head") == "clip-text" else PRESETS, name, changes)
        return config


# By whether `per_tensor` is set, which masks alone use: a distance in the whole run, and not a rate, is given there.
_RATES: Mapping[bool, Mapping[str, float]] = {
    False: {"mask": 50.0, "full": 0.15, "lora": 0.1, "bitfit": 0.1},
    True: {"mask": 60.0, "full": 0.01, "lora": 0.02, "bitfit": 0.1},
}

_CLIP_RATE = 10.0  # of the paper's masks of CLIP
_PAPER_VIEWS = dataclasses.replace(ONE_VIEW, large_scale=(1.0, 1.0), jitter=(0.4, 0.4, 0.4, 0.4), solarise_p=0.2)

PRESETS: Mapping[str, TrainConfig] = {
    # As `fast` of an adaptation: anchored statistics, one distance for every backbone, gentle views.
    "fast": TrainConfig(
        steps=300,
        head_start="probe",
        head_lr=0.01,
        per_tensor=True,
        # Gentler than without labels: a head that starts from a probe of whole images knows no others.
        views=dataclasses.replace(
            ONE_VIEW, large_scale=(0.8, 1.0), jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.2, grey_p=0.0
        ),
        mask=MaskConfig(norm="anchored"),
    ),
    "paper": TrainConfig(epochs=150, warmup=40 / 150, views=_PAPER_VIEWS, head_lr=0.15),
}
_PAPER_CLIP = {
    **PRESETS,
    "paper": TrainConfig(epochs=32, views=_PAPER_VIEWS, mask=MaskConfig(select="paper-vit")),
}
