"""How images must be prepared for a backbone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import nn

from .errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How images must be prepared for the base: a mask learned under one preparation fails under another."""

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str

    @staticmethod
    def of_model(model: nn.Module) -> tuple[str | None, Preprocessing | None]:
        """Name and preprocessing that a timm model carries; (None, None) for other models."""
        known = getattr(model, "pretrained_cfg", None)
        if not isinstance(known, Mapping):
            return None, None
        architecture, tag = known.get("architecture"), known.get("tag")
        name = f"{architecture}.{tag}" if architecture and tag else architecture
        try:
            height, width = (int(side) for side in known["input_size"][-2:])
            mean, std = (tuple(float(value) for value in known[key]) for key in ("mean", "std"))
            return name, Preprocessing((height, width), mean, std, str(known["interpolation"]))
        except (KeyError, TypeError, ValueError):
            return name, None


IMAGENET = Preprocessing((224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear")


def preprocessing_for(known: Preprocessing | None, given: Preprocessing | None, size: int | None) -> Preprocessing:
    """As given, else as the model carries it, else ImageNet's; at another size, if one is asked for."""
    preprocessing = given or known or IMAGENET
    preprocessing = preprocessing if size is None else dataclasses.replace(preprocessing, size=(size, size))
    if preprocessing.size[0] != preprocessing.size[1]:
        raise ConfigError(
            "views must be square", expected="one size", found=preprocessing.size, todo="set a size: --size"
        )
    return preprocessing
