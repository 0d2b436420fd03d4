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

    adapt: settings of the dispatcher and of every expert; each expert takes as many steps as the dispatcher.
    """

    adapt: AdaptConfig = dataclasses.field(default_factory=lambda: AdaptConfig.preset("fast"))

    def __post_init__(self) -> None:
        super().__post_init__()
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
        if self.adapt.steps is not None:
            return dataclasses.replace(self.adapt, seed=seed)
        epochs = max(1, round((self.adapt.epochs or 150) * images / own))
        return dataclasses.replace(self.adapt, seed=seed, epochs=epochs)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, ready for JSON."""
        return to_dict(self)
