"""`pretrain`: how `selfmask/tiny` and `selfmask/vit` get their weights, in the course of every run, on full weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from safetensors.torch import save
from torch import nn

from ..backbones.tiny import PREPROCESSING, TinyResNet
from ..backbones.vit import SmallViT
from ..data import Images
from ..data.images import MAX_PIXELS
from ..data.partition import LearnedSplit, open_to_learn
from ..data.views import ViewsConfig
from ..errors import ConfigError, RunWriteError
from ..files import write_atomically
from ..objectives import Objective
from ..objectives.dino import DINO, DINOConfig
from ..objectives.heads import LinearHead
from ..objectives.supervised import Supervised
from ..objectives.swav import SwAV, SwAVConfig
from ..running import as_vectors
from ..training.config import RunConfig
from ..training.display import Display
from ..training.loop import ParameterGroup
from ..training.methods import Learner
from ..training.run import Recipe, Run, run

NetworkName = Literal["tiny", "vit"]
PretrainObjective = Literal["swav", "dino"]
_NETWORKS: Mapping[str, type[nn.Module]] = {"tiny": TinyResNet, "vit": SmallViT}
# The rate and, by whether there are labels, the weight decay. A transformer's tensors have gradients of very different
# sizes: there, each is measured in units of its own, and rates are of steps that are as large as that. At 3e-4, SwAV's
# loss goes back to ln K and stays there.
_RATES = {"tiny": 0.2, "vit": 1e-4}
_DECAY = {"tiny": {False: 1e-4, True: 5e-4}, "vit": {False: 0.05, True: 0.05}}

# Sharper assignments, few prototypes and soft crops, or a small network from random weights stays at ln K.
_SWAV = SwAVConfig(prototypes=100, epsilon=0.03, queue_length=0, freeze_prototypes=0.02)
# A teacher that follows within a short run, and as few outputs as a small data set can tell apart.
_DINO = DINOConfig(out_dim=256, teacher_momentum=0.9, freeze_last_layer=0.02)
_UNLABELLED_VIEWS = ViewsConfig(size=32, large=2, small=0, large_scale=(0.3, 1), blur_p=0)
_LABELLED_VIEWS = ViewsConfig(
    size=32, large=1, small=0, large_scale=(0.4, 1), jitter=(0.3, 0.3, 0.3, 0.05), blur_p=0, grey_p=0.1
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig(RunConfig):
    """Settings for training a network from random weights.

    network: what to train: tiny (the residual network selfmask/tiny) or vit (the vision transformer selfmask/vit).
    labels: train with labels (cross-entropy) instead of without.
    objective: what is learned without labels: swav or dino.
    lr: learning rate of all weights; by default 0.2 for tiny, 0.0001 for vit, whose gradients are scaled to a root mean
        square of 1 in each tensor.
    weight_decay: weight decay of all weights; by default 5e-4 with labels and 1e-4 without for tiny, 0.05 for vit.
    """

    network: NetworkName = "tiny"
    labels: bool = False
    objective: PretrainObjective = "swav"
    epochs: float | None = 20.0
    batch_size: int = 256
    lr: float = None  # type: ignore[assignment]
    weight_decay: float | None = None  # type: ignore[assignment]
    warmup: float = 0.1
    checkpoint_every: int = 100
    track: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network not in get_args(NetworkName):
            raise ConfigError("unknown network", expected=", ".join(get_args(NetworkName)), found=self.network)
        if self.objective not in get_args(PretrainObjective):
            expected = " or ".join(get_args(PretrainObjective))
            raise ConfigError("unknown objective", expected=expected, found=self.objective)
        if self.lr is None:
            object.__setattr__(self, "lr", _RATES[self.network])
        if self.weight_decay is None:
            object.__setattr__(self, "weight_decay", _DECAY[self.network][self.labels])

    def changed(self, **changes: Any) -> Self:
        if changes.get("network", self.network) != self.network:
            changes = {"lr": None, "weight_decay": None, **changes}
        if changes.get("labels", self.labels) != self.labels:
            changes = {"weight_decay": None, **changes}
        return super().changed(**changes)

    @property
    def weights_file(self) -> str:
        return f"{self.network}.safetensors"


def pretrain(
    images: str | Path | Images,
    out: Path,
    config: PretrainConfig | None = None,
    *,
    resume: bool = False,
    about: Mapping[str, Any] | None = None,
    max_bad: float = 0.05,
    split: LearnedSplit = "train",
    max_pixels: int = MAX_PIXELS,
    display: Display | None = None,
) -> Path:
    """Train one of our networks from random weights; return the file of its weights.

    Without labels: SwAV or DINO, as an adaptation does, but on the weights themselves. With labels: cross-entropy on
    one view.
    split, max_pixels: as in `adapt`.
    """
    source, note = open_to_learn(images, split=split, max_pixels=max_pixels)
    if note and display is not None:
        display.say(note)
    config = config or PretrainConfig()
    about = {"images": str(images), **(about or {}), "backbone": f"selfmask/{config.network}"}
    run(Pretraining(source, config), out=out, resume=resume, about=about, max_bad=max_bad, display=display)
    return out / config.weights_file


class Pretraining(Recipe):
    """The recipe of `pretrain`: all weights learn, from random ones."""

    verb = "pretrain"
    config: PretrainConfig
    preprocessing = PREPROCESSING

    def __init__(self, images: Images, config: PretrainConfig) -> None:
        self.source, self.config, self.with_labels = images, config, config.labels  # type: ignore[misc]

    def images(self) -> Images:
        if self.config.labels and self.source.labels is None:
            raise ConfigError(
                "these images have no labels", todo="omit --labels, or give a folder with a sub-folder for each class"
            )
        return self.source

    def learner(self) -> Learner:
        torch.manual_seed(self.config.seed)
        model = _NETWORKS[self.config.network]()
        return Learner(model, list(model.parameters()))

    def views(self) -> ViewsConfig:
        return _LABELLED_VIEWS if self.config.labels else _UNLABELLED_VIEWS

    def objective(self, run: Run) -> Objective:
        if not self.config.labels:
            return self._unlabelled(run)
        classes = [str(number) for number in range(max(run.images.labels or []) + 1)]
        return Supervised(LinearHead(run.features, classes, seed=self.config.seed))

    def _unlabelled(self, run: Run) -> Objective:
        if self.config.objective == "swav":
            return SwAV(run.features, _SWAV, seed=self.config.seed)
        model = run.learner.model
        with torch.no_grad():
            mean = torch.cat([as_vectors(model(batch)) for batch in run.reference]).mean(0)
        return DINO(model, mean, _DINO, seed=self.config.seed)

    def groups(self, run: Run, objective: Objective) -> list[ParameterGroup]:
        parameters = [*run.learner.parameters, *objective.parameters()]
        scaled = self.config.network == "vit"
        return [ParameterGroup(parameters, self.config.lr, self.config.weight_decay or 0.0, per_tensor=scaled)]

    def leaves(self) -> list[str]:
        return [self.config.weights_file]

    def finish(self, run: Run) -> dict[str, Any]:
        assert run.folder is not None
        write_atomically(run.folder.path / self.config.weights_file, save(half(run.learner.model)), RunWriteError)
        return {"steps": run.steps, "loss": run.folder.last_loss, "seconds": run.seconds()}


def half(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights as they are shipped: floating-point ones with 16 bits."""
    return {
        name: (value.half() if value.is_floating_point() else value).contiguous()
        for name, value in model.state_dict().items()
    }
