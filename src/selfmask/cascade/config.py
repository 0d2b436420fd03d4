"""The settings of a cascade."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from ..errors import ConfigError
from ..presets import AdaptConfig
from ..training.seeds import derive

RouterName = Literal["gmm", "kmeans"]
ScaleName = Literal["whiten", "none", "eigenvalues"]
MAX_EXPERTS = 64  # so that the masks of a hostile file take no more memory than two copies of the base


@dataclasses.dataclass(frozen=True, kw_only=True)
class CascadeConfig:
    """What decides what a cascade learns.

    experts: how many clusters, and a mask for each.
    router: "gmm", a Gaussian mixture with full covariances, or "kmeans".
    components: principal components of the dispatcher's features that the router looks at.
    scale: "whiten" gives every feature of the cascade unit variance on the training images, "none" leaves the variance
        that it has, "eigenvalues" divides by that, as the paper's text has it. It can be chosen again for every use.
    adapt: of the dispatcher, and of every expert: they take as many steps as the dispatcher.
    """

    experts: int = 5
    router: RouterName = "gmm"
    components: int = 20
    scale: ScaleName = "whiten"
    adapt: AdaptConfig = dataclasses.field(default_factory=lambda: AdaptConfig.preset("fast"))

    def __post_init__(self) -> None:
        for name, least, most in (("experts", 1, MAX_EXPERTS), ("components", 1, None)):
            value = getattr(self, name)
            if type(value) is not int or value < least or (most is not None and value > most):
                span = f"{least} or more" if most is None else f"{least} to {most}"
                raise ConfigError(f"{name} is out of range", expected=span, found=value)
        for name, known in (("router", get_args(RouterName)), ("scale", get_args(ScaleName))):
            if getattr(self, name) not in known:
                raise ConfigError(f"unknown {name}", expected=" or ".join(known), found=getattr(self, name))

    @staticmethod
    def preset(name: str, **changes: Any) -> CascadeConfig:
        """A preset of adaptations, with some settings changed: `CascadeConfig.preset("fast", experts=3, steps=300)`."""
        own = {field.name for field in dataclasses.fields(CascadeConfig)} - {"adapt"}
        settings = {key: changes.pop(key) for key in own & set(changes)}
        return CascadeConfig(**settings, adapt=AdaptConfig.preset(name, **changes))

    @property
    def seed(self) -> int:
        return self.adapt.seed

    def expert(self, index: int, images: int, own: int) -> AdaptConfig:
        """Of the expert for a cluster that has `own` of all images.

        The paper's rule: so many epochs of its own images that it takes as many steps as the dispatcher.
        """
        seed = derive(self.seed, "expert", index)
        if self.adapt.steps is not None:
            return dataclasses.replace(self.adapt, seed=seed)
        epochs = max(1, round((self.adapt.epochs or 150) * images / own))
        return dataclasses.replace(self.adapt, seed=seed, epochs=epochs)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "adapt": self.adapt.to_dict()}
