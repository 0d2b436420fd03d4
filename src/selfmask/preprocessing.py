"""How images must be prepared for a backbone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from torch import nn

from . import checked
from .errors import ConfigError, OversizedImagesError

INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic")
"""How images can be resized: what torchvision does with tensors."""
_MAX_SIDE = 1 << 14
_TIMES = 3  # as long as the base's own images, each side, may those of a file be
_ALWAYS = 256 * 256  # pixels, which no base is troubled by


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How images must be prepared for the base: a mask learned under one preparation fails under another."""

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str

    @staticmethod
    def of_json(value: object) -> Preprocessing:
        """From what a file says; what images cannot be prepared by is a ValueError."""
        fields = checked.mapping(value, most=4)
        size = checked.items(
            checked.member(fields, "size"), lambda side: checked.count(side, least=1, most=_MAX_SIDE), most=2
        )
        mean = checked.items(
            checked.member(fields, "mean"), lambda each: checked.number(each, least=-1e6, most=1e6), most=3
        )
        std = checked.items(
            checked.member(fields, "std"), lambda each: checked.number(each, least=1e-6, most=1e6), most=3
        )
        if len(size) != 2 or not len(mean) == len(std) == 3:
            raise ValueError(f"a size of {len(size)} sides, {len(mean)} means and {len(std)} deviations")
        interpolation = checked.one_of(checked.member(fields, "interpolation"), INTERPOLATIONS)
        return Preprocessing((size[0], size[1]), mean, std, interpolation)

    @staticmethod
    def of_model(model: nn.Module) -> tuple[str | None, Preprocessing | None]:
        """Name and preprocessing that a timm model carries; None for what is not known, or cannot be used."""
        known = getattr(model, "pretrained_cfg", None)
        if not isinstance(known, Mapping):
            return None, None
        architecture, tag = known.get("architecture"), known.get("tag")
        name = f"{architecture}.{tag}" if architecture and tag else architecture
        try:
            size = [int(side) for side in known["input_size"][-2:]]
            mean, std = ([float(value) for value in known[key]] for key in ("mean", "std"))
            words = {"size": size, "mean": mean, "std": std, "interpolation": str(known["interpolation"])}
            return name, Preprocessing.of_json(words)
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


def of_file(stored: Preprocessing, own: Preprocessing | None, size: int | None = None) -> Preprocessing:
    """What a file says of the images of a base that has its own preprocessing, or at the `size` that the user gives.

    Memory grows with the pixels, so a file may not call for far more of them than the base does by itself: a few bytes
    would fill any memory. Who learned at such a size says so again.
    """
    if size is not None:
        return dataclasses.replace(stored, size=(size, size))
    known = (own or IMAGENET).size
    most = max(_TIMES**2 * math.prod(known), _ALWAYS)
    if math.prod(stored.size) > most:
        height, width = stored.size
        raise OversizedImagesError(
            "the file asks for far larger images than its backbone takes",
            expected=f"at most {most} pixels ({_TIMES} times the sides of {known[0]} x {known[1]})",
            found=f"{height} x {width}",
            todo=f"if that is meant, give the size yourself: --size {max(height, width)} (in Python: size=)",
        )
    return stored
