"""How large a study is: in miniature on a laptop, or as in the paper; and with which backbones and data sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from ..commands.adapt_config import AdaptConfig
from ..commands.pretrain import PretrainConfig
from ..commands.train import TrainConfig
from ..data.views import ViewsConfig
from ..errors import ConfigError
from ..objectives.swav import SwAVConfig
from .tasks import Subject

ScaleName = Literal["laptop", "paper"]
SWAV, DINO = "swav/resnet50", "dino/resnet50"
RESNET18, RESNET50, CLIP = "resnet18", "resnet50", "open_clip/ViT-B-32:openai"


class Case(NamedTuple):
    """A backbone and a data set, and those of the paper whose numbers they stand beside."""

    subject: Subject
    backbone: str
    data: str

    def __str__(self) -> str:
        named = (self.subject.backbone, self.backbone), (self.subject.data, self.data)
        return " x ".join(own if paper in (own, "") else f"{own} (for {paper})" for own, paper in named)


@dataclasses.dataclass(frozen=True)
class Scale:
    """What the runs of a study are made with.

    data, backbones: names, where others are asked for than those of the paper, or what stands in for them.
    weights: file with the weights of the backbone. seeds: repetitions of every run.
    """

    name: ScaleName
    data: Sequence[str] = ()
    backbones: Sequence[str] = ()
    weights: str | None = None
    seeds: int | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(ScaleName):
            raise ConfigError("unknown scale", expected=" or ".join(get_args(ScaleName)), found=self.name)
        if self.seeds is not None and self.seeds < 1:
            raise ConfigError("seeds is out of range", expected="1 or more", found=self.seeds)

    @property
    def in_miniature(self) -> bool:
        return self.name == "laptop"

    @property
    def recipe(self) -> str:
        """What its runs are like, in words."""
        return _LAPTOP_RECIPE if self.in_miniature else _PAPER_RECIPE

    def repetitions(self, paper: int = 1) -> range:
        """The seeds: as many as asked for, or as the paper had, or enough to see a spread."""
        return range(self.seeds or (_LAPTOP_SEEDS if self.in_miniature else paper))

    def cases(self, data: Sequence[str], backbones: Sequence[str] = (SWAV,)) -> list[Case]:
        """Backbones with data sets: those of the paper, or what stands in for the first of them."""
        if not self.in_miniature:
            own = self.backbones or backbones
            return [Case(Subject(b, d, self.weights), _PRINTED.get(b, b), d) for b in own for d in self.data or data]
        sets = self.data or _LAPTOP_DATA
        return [
            Case(Subject(backbone, name, self.weights, _LAPTOP_IMAGES), backbones[0], _stands_for(name, data))
            for backbone in self.backbones or _LAPTOP_BACKBONES
            for name in sets
        ]

    def adapt(self, **changes: Any) -> AdaptConfig:
        """Self-supervised masking as the paper's code did it; in a short run, with heads that know the data."""
        short = _SHORT_ADAPT if self.in_miniature else {}
        return _changed(AdaptConfig.preset("reference", track=(), **short), changes)

    def pretrain(self, **changes: Any) -> PretrainConfig | None:
        """How backbones are pretrained in a short study; in a long one, others have done it."""
        return PretrainConfig(**_SHORT_PRETRAIN, **changes) if self.in_miniature else None

    def train(self, **changes: Any) -> TrainConfig:
        """Masking, or full fine-tuning, with labels."""
        short = _SHORT_TRAIN if self.in_miniature else {}
        own = {"head": changes["head"]} if "head" in changes else {}  # CLIP's is a preset of its own
        return _changed(TrainConfig.preset("paper", track=(), **short, **own), changes)


def _stands_for(name: str, data: Sequence[str]) -> str:
    """The data set of the paper, of those that a study has, whose numbers one stands beside."""
    likely = _STANDS_FOR.get(name, name)
    return likely if likely in data else data[0]


C = TypeVar("C", AdaptConfig, TrainConfig)


def _changed(config: C, changes: dict[str, Any]) -> C:
    """Settings of the mask and of the objective may be given as mappings of what differs."""
    parts = {key: getattr(config, key) for key in ("mask", "objective") if isinstance(changes.get(key), dict)}
    made = {key: dataclasses.replace(part, **changes[key]) for key, part in parts.items()}
    return config.changed(**{**changes, **made})


_PAPER_RECIPE = (
    "Every run is set up as the paper says: the presets `reference` (without labels) and `paper` (with them)."
)
_LAPTOP_RECIPE = (
    "In miniature: the paper's rule and objective in a short run. Without labels, scores learn at 20 times the paper's "
    "rate, so that a few per cent of the weights are switched off, as in the paper; with labels, at its own. Heads "
    "start from the data (a projector that half whitens the frozen features, prototypes at the centres of clusters; "
    "with labels, a linear probe), because a short run learns nothing from random ones."
)
_PRINTED = {CLIP: "vit_base_patch32_clip_224.openai"}  # names in the list of the paper's numbers
_LAPTOP_SEEDS = 3
_LAPTOP_BACKBONES = ("selfmask/tiny",)
_LAPTOP_DATA = ("selfmask/fashion",)
_STANDS_FOR = {"selfmask/fashion": "cifar10", "cifar10": "cifar10"}


# In miniature. Without labels, the rate of scores is that of the paper times `_FASTER`: so much that a short run
# switches off a few per cent of the weights, as the paper's long ones did. With labels, the paper's own rate does that.
_FASTER = 20.0
_LAPTOP_IMAGES = 2000  # to measure with, and with labels to learn from; those to test with are all that there are
_SHORT: dict[str, Any] = {"batch_size": 32, "checkpoint_every": 1000}
_SHORT_ADAPT = {
    **_SHORT,
    "steps": 30,
    "lr": 50.0 * _FASTER,
    "most_images": 1000,
    "heads_first": 0.1,
    # Heads that start from the data and are never frozen. A queue would not be full before the end.
    "objective": SwAVConfig(heads="data", freeze_prototypes=0.0, queue_length=0),
    "views": ViewsConfig(small=0),
}
_SHORT_TRAIN = {**_SHORT, "steps": 40, "log_every": 2, "head_start": "probe", "head_lr": 0.01}
_SHORT_PRETRAIN: dict[str, Any] = {"steps": 60, "epochs": None, "batch_size": 64, "lr": 0.05, "checkpoint_every": 1000}
