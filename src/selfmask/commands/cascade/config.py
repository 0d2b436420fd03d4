"""The settings of a cascade."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...cascade.config import ShapeConfig
from ...errors import ConfigError
from ...settings import to_dict
from ...training.seeds import derive
from ..adapt_config import AdaptConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CascadeConfig(ShapeConfig):
    """All settings of a cascade; `CascadeConfig.preset` returns tested ones.

    expert_images: number of images, counting repetitions, that an expert sees in all; the paper had 7,500,000 (150
        epochs of 50,000) for every data set. By default, each expert takes as many steps as the dispatcher.
    adapt: settings of the dispatcher and of every expert.
    """

    expert_images: int | None = None
    adapt: AdaptConfig = dataclasses.field(default_factory=lambda: AdaptConfig.preset("fast"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expert_images is not None and self.expert_images < 1:
            raise ConfigError("expert_images is out of range", expected="1 or more", found=self.expert_images)
        if self.adapt.method != "mask":
            raise ConfigError("a cascade is made of masks", expected="the method mask", found=self.adapt.method)

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
        if self.expert_images is not None:
            return self.adapt.changed(seed=seed, epochs=float(max(1, round(self.expert_images / own))))
        if self.adapt.steps is not None:
            return dataclasses.replace(self.adapt, seed=seed)
        epochs = max(1, round((self.adapt.epochs or 150) * images / own))
        return dataclasses.replace(self.adapt, seed=seed, epochs=epochs)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, ready for JSON."""
        return to_dict(self)
