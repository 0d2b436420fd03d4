"""What a study is made of: runs that a user could have made by hand, each named by all that decides its result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ..backbones import Backbone
from ..backbones.text import class_embeddings
from ..commands.adapt import adapt
from ..commands.adapt_config import AdaptConfig
from ..commands.cascade.config import CascadeConfig
from ..commands.cascade.run import fit_cascade
from ..commands.evaluate import features_of
from ..commands.opening import load_embedder
from ..commands.pretrain import PretrainConfig, pretrain
from ..commands.train import TrainConfig, train
from ..data import Images
from ..embedding.cache import FeatureCache
from ..evaluation.measuring import evaluate, with_maps
from ..evaluation.protocols import Settings
from ..files import RunFile, write_atomically
from ..objectives.heads import TextHead
from ..settings import to_dict
from ..training.config import RunConfig
from ..training.display import StagesDisplay

_A_LOOK = 30.0  # what a task without training costs, in steps


@dataclasses.dataclass(frozen=True)
class Subject:
    """A backbone, and the images that it is adapted to and judged by.

    weights: file with the weights of the backbone. most_images: so many of the training images at most, of each class
    alike. start: how the backbone is pretrained, where that is part of the study.
    """

    backbone: str
    data: str
    weights: str | None = None
    most_images: int | None = None
    start: PretrainConfig | None = None

    def __str__(self) -> str:
        return f"{self.backbone} on {self.data}"


class World(Protocol):
    """What tasks ask of whoever runs them."""

    display: StagesDisplay

    def place(self, cell: Task) -> Path: ...
    def result(self, cell: Task) -> dict[str, Any]: ...
    def backbone(self, subject: Subject) -> Backbone:
        """Made anew: what learns may change it."""

    def weights(self, subject: Subject) -> Path | None:
        """The file with its weights; None for those that belong to its name."""

    def labelled(self, subject: Subject) -> tuple[Images, Images]:
        """Images to learn from, and to test with."""

    @property
    def features(self) -> FeatureCache: ...


@dataclasses.dataclass(frozen=True)
class Task(ABC):
    """One run or measurement. Equal tasks of different studies are run once: what they are decides where they lie."""

    verb: ClassVar[str]
    subject: Subject

    @property
    def needs(self) -> tuple[Task, ...]:
        """Those whose results it takes."""
        return self.starts

    @property
    def starts(self) -> tuple[Task, ...]:
        """What pretrains its backbone, if anything does."""
        subject = self.subject
        if subject.start is None:
            return ()
        return (Pretrain(dataclasses.replace(subject, start=None), subject.start),)

    @property
    @abstractmethod
    def title(self) -> str:
        """What it is, for people; told apart from others by its name."""

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """All that decides its result besides backbone, images and what it needs; plain values."""

    @cached_property
    def name(self) -> str:
        what = {
            "verb": self.verb,
            **dataclasses.asdict(self.subject),
            "settings": self.settings(),
            "needs": [task.name for task in self.needs],
        }
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        return f"{self.verb}-{digest[:16]}"

    def cost(self, images: int) -> float:
        """In steps, or what takes as long, with so many images."""
        return _A_LOOK

    @abstractmethod
    def run(self, place: Path, world: World) -> None:
        """Leave the result in its folder."""


def _steps(config: RunConfig, images: int) -> float:
    return _A_LOOK + config.number_of_steps(max(1, images // config.batch_size))


@dataclasses.dataclass(frozen=True)
class Pretrain(Task):
    """`selfmask pretrain`."""

    verb = "pretrain"
    config: PretrainConfig

    @property
    def title(self) -> str:
        return f"pretrain {self.subject}: {'labels' if self.config.labels else self.config.objective}"

    def settings(self) -> Mapping[str, Any]:
        return to_dict(self.config)

    def cost(self, images: int) -> float:
        return _steps(self.config, images)

    def run(self, place: Path, world: World) -> None:
        images = world.labelled(self.subject)[0]
        about = {"images": self.subject.data}
        pretrain(images, place, self.config, resume=True, about=about, display=world.display)


@dataclasses.dataclass(frozen=True)
class Adapt(Task):
    """`selfmask adapt`.

    share_of: a run whose share of active weights this one takes over, for top-k rules.
    """

    verb = "adapt"
    config: AdaptConfig
    share_of: Task | None = None

    @property
    def needs(self) -> tuple[Task, ...]:
        return (*self.starts, *(() if self.share_of is None else (self.share_of,)))

    @property
    def title(self) -> str:
        mask = self.config.mask
        return f"adapt {self.subject}: {self.config.method}, {mask.rule}, {mask.select}, seed {self.config.seed}"

    def settings(self) -> Mapping[str, Any]:
        return to_dict(self.config)

    def cost(self, images: int) -> float:
        views = self.config.chosen_views
        return (views.large + views.small / 4) * _steps(self.config, images)

    def run(self, place: Path, world: World) -> None:
        config = self.config
        if self.share_of is not None:
            found = world.result(self.share_of)["active"]
            config = config.changed(mask=config.mask.changed(active_share=found))
        backbone = world.backbone(self.subject)
        adapt(
            backbone.model,
            world.labelled(self.subject)[0],
            config,
            out=place,
            resume=True,
            preprocessing=backbone.preprocessing,
            about=_about(self.subject),
            report=False,
            display=world.display,
        )


@dataclasses.dataclass(frozen=True)
class Train(Task):
    """`selfmask train`."""

    verb = "train"
    config: TrainConfig

    @property
    def title(self) -> str:
        config = self.config
        share = f"{100 * config.label_fraction:g} % of the labels"
        return f"train {self.subject}: {config.method}, {share}, seed {config.seed}"

    def settings(self) -> Mapping[str, Any]:
        return to_dict(self.config)

    def cost(self, images: int) -> float:
        return _steps(self.config, round(images * self.config.label_fraction))

    def run(self, place: Path, world: World) -> None:
        backbone = world.backbone(self.subject)
        images, test = world.labelled(self.subject)
        train(
            backbone.model,
            images,
            self.config,
            test=test,
            head=self._head(images.classes or [], world),
            out=place,
            resume=True,
            preprocessing=backbone.preprocessing,
            about=_about(self.subject),
            report=False,
            display=world.display,
        )

    def _head(self, classes: list[str], world: World) -> TextHead | None:
        """CLIP's text embeddings of the classes, where they are the head."""
        if self.config.head != "clip-text":
            return None
        weights = world.weights(self.subject)
        return TextHead(*class_embeddings(self.subject.backbone, classes, weights=weights), classes)


@dataclasses.dataclass(frozen=True)
class Cascade(Task):
    """`selfmask cascade`, with a run that is there as the dispatcher."""

    verb = "cascade"
    dispatcher: Adapt
    config: CascadeConfig

    @property
    def needs(self) -> tuple[Task, ...]:
        return (self.dispatcher,)

    @property
    def title(self) -> str:
        return f"cascade {self.subject}: {self.config.experts} experts, seed {self.config.seed}"

    def settings(self) -> Mapping[str, Any]:
        return to_dict(self.config)

    def cost(self, images: int) -> float:
        return self.config.experts * _steps(self.config.adapt, images)

    def run(self, place: Path, world: World) -> None:
        backbone = world.backbone(self.subject)
        fit_cascade(
            backbone.model,
            world.labelled(self.subject)[0],
            self.config,
            out=place,
            dispatcher=world.place(self.dispatcher),
            preprocessing=backbone.preprocessing,
            about=_about(self.subject),
        )


@dataclasses.dataclass(frozen=True)
class Measure(Task):
    """`selfmask evaluate`: k-NN and linear probes of a run, or of the frozen backbone.

    shares: shares of the labels for the probes, besides all of them. whiten: power of a map; each variant is then
    measured with it, too.
    """

    verb = "measure"
    of: Task | None = None
    shares: tuple[float, ...] = ()
    draws: int = 1
    stratified: bool = True
    whiten: float | None = None

    @property
    def needs(self) -> tuple[Task, ...]:
        return self.starts if self.of is None else (self.of,)

    @property
    def title(self) -> str:
        return f"measure {self.subject if self.of is None else self.of.title}" + (
            " with few labels" * bool(self.shares) + ", whitened" * (self.whiten is not None)
        )

    def settings(self) -> Mapping[str, Any]:
        own = {"shares": list(self.shares), "draws": self.draws, "stratified": self.stratified}
        return own if self.whiten is None else {**own, "whiten": self.whiten}

    def run(self, place: Path, world: World) -> None:
        subject = self.subject
        what = subject.backbone if self.of is None else world.place(self.of)
        weights = world.weights(subject)
        embedder = load_embedder(what, backbone=None if self.of is None else subject.backbone, weights=weights)
        features = features_of(embedder, *world.labelled(subject), cache=world.features)
        if self.whiten is not None:
            features = with_maps(features, power=self.whiten)
        found: dict[str, Any] = {}
        for share in (1.0, *self.shares):
            settings = Settings(k=(20, 200), label_fraction=share, seeds=self.draws, stratified=self.stratified)
            protocols = ["knn", "linear"] if share == 1 else ["linear"]
            for key, variants in evaluate("", features, protocols, settings).results.items():
                name = key if share == 1 else f"{key} {share:g}"
                found[name] = {variant: {"top1": each.top1, "each": each.each} for variant, each in variants.items()}
        leave(place, found)


def leave(place: Path, result: Mapping[str, Any]) -> None:
    """Write the result of a task that has no run folder of its own."""
    write_atomically(place / RunFile.RESULT, (json.dumps(result, indent=1) + "\n").encode())


def _about(subject: Subject) -> dict[str, Any]:
    return {"backbone": subject.backbone, "weights": subject.weights, "images": subject.data}
