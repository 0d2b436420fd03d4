"""What turns images into vectors: a model in eval mode, with its preprocessing and the variants of its vectors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..evaluation.feature_map import FeatureMap
from ..maskfile import Fingerprints, PackedMask
from ..masking import MaskedModel
from ..objectives.heads import Head
from ..preprocessing import Preprocessing
from ..running import as_vectors
from ..training.beside import Tuned
from ..training.config import Precision
from ..training.precision import autocast

FROZEN, MASK, TRAINED = "frozen", "mask", "trained"


@runtime_checkable
class Embeddable(Protocol):
    """What can be embedded: a plain model, a mask on its base, a cascade. One pass may give several variants."""

    @property
    def variants(self) -> Mapping[str, str]:
        """The variants of its vectors, and what to call them. The frozen backbone comes first, if it is one of them."""

    def vectors(self, pixels: Tensor, variants: Sequence[str]) -> list[Tensor]:
        """The vectors of normalised images in some variants; no network is run twice on an image."""

    def fingerprint(self, variant: str) -> str:
        """A hash of all that the vectors of a variant depend on, but images and preprocessing."""


@dataclasses.dataclass(frozen=True)
class Embedder:
    """A model in eval mode, on the GPU if there is one, with its preprocessing.

    variants: how to ask the model for vectors; by default what a plain model, a `MaskedModel` or an `Embeddable` has.
    variant: the one to give where only one is wanted; by default the last.
    head: what was trained with the model to tell classes.
    batch_size: images to run at a time, where the user does not say.
    map: what the vectors go through at the end.
    shape: of an image's array, where that is not a vector (`embedding/dense.py`); rows are these, flattened.
    precision: what networks compute with; vectors are float32 in any case.
    compile: compile the networks with torch.compile.
    """

    name: str
    model: nn.Module
    preprocessing: Preprocessing
    width: int
    head: Head | None = None
    variants: Embeddable = None  # type: ignore[assignment]
    variant: str = ""
    batch_size: int = 64
    map: FeatureMap | None = None
    shape: tuple[int, ...] = ()
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False

    def __post_init__(self) -> None:
        if self.variants is None:
            object.__setattr__(self, "variants", variants_of(self.model))
        if not self.variant:
            object.__setattr__(self, "variant", list(self.variants.variants)[-1])

    def module(self, variants: Sequence[str]) -> nn.Module:
        """A module whose output is the vectors of these variants, side by side: every image is decoded only once."""
        module = _SideBySide(self.model, self.variants, variants, self.map, self.precision)
        return torch.compile(module) if self.compile else module  # type: ignore[return-value]

    def fingerprint(self, variant: str) -> str:
        """A hash of all that the vectors of a variant depend on, but the images."""
        device = next(self.model.parameters(), torch.empty(0)).device.type
        facts: list[object] = [self.variants.fingerprint(variant), dataclasses.asdict(self.preprocessing), device]
        facts += [] if self.map is None else [self.map.sha256]
        facts += [] if self.precision == "float32" else [self.precision]
        return _hash([*facts, "compiled"] if self.compile else facts)


def variants_of(model: nn.Module) -> Embeddable:
    if isinstance(model, MaskedModel):
        return MaskVariants(model)
    return model if isinstance(model, Embeddable) else PlainVariants(model, FROZEN, "frozen backbone")


class PlainVariants:
    """The one variant of a plain model: a frozen backbone, or one whose weights were trained."""

    def __init__(self, model: nn.Module, name: str, title: str) -> None:
        self.model, self.variants = model, {name: title}

    def vectors(self, pixels: Tensor, variants: Sequence[str]) -> list[Tensor]:
        return [self.model(pixels) for _ in variants]

    def fingerprint(self, variant: str) -> str:
        return base_fingerprint(self.model)


class MaskVariants:
    """The frozen backbone, and the mask on it."""

    variants: Mapping[str, str] = {FROZEN: "frozen backbone", MASK: "with the mask"}

    def __init__(self, masked: MaskedModel) -> None:
        self.masked = masked

    def vectors(self, pixels: Tensor, variants: Sequence[str]) -> list[Tensor]:
        return [self._frozen(pixels) if variant == FROZEN else self.masked(pixels) for variant in variants]

    def _frozen(self, pixels: Tensor) -> Tensor:
        with self.masked.disable_mask():
            vectors: Tensor = self.masked(pixels)
        return vectors

    def fingerprint(self, variant: str) -> str:
        with self.masked.lock:
            base = base_fingerprint(self.masked.base, self.masked.fingerprints)
        if variant == FROZEN:
            return base
        return mask_fingerprint(base, self.masked.pack())


def mask_fingerprint(base: str, mask: PackedMask) -> str:
    """A hash of all that the vectors of a mask depend on; base: the fingerprint of its base."""
    return _hash([base, mask.sha256, Fingerprints().of(mask.norm), mask.config])


class TunedVariants:
    """The frozen backbone, and what another method than a mask made of it; that goes by the name of the method."""

    def __init__(self, tuned: Tuned, method: str) -> None:
        self.tuned, self.variants = tuned, {FROZEN: "frozen backbone", method: f"as trained ({method})"}

    def vectors(self, pixels: Tensor, variants: Sequence[str]) -> list[Tensor]:
        return [self.tuned.frozen(pixels) if variant == FROZEN else self.tuned(pixels) for variant in variants]

    def fingerprint(self, variant: str) -> str:
        return base_fingerprint(self.tuned.base if variant == FROZEN else self.tuned.learned)


class _SideBySide(nn.Module):
    def __init__(
        self,
        model: nn.Module,
        variants: Embeddable,
        names: Sequence[str],
        whiten: FeatureMap | None,
        precision: Precision,
    ) -> None:
        super().__init__()
        self.model, self.variants, self.names, self.whiten, self.precision = model, variants, names, whiten, precision

    def forward(self, pixels: Tensor) -> Tensor:
        with autocast(self.precision, pixels.device):
            vectors = self.variants.vectors(pixels, self.names)
        if self.precision != "float32":
            vectors = [each.float() for each in vectors]
        return torch.cat(vectors if self.whiten is None else [self.whiten(as_vectors(each)) for each in vectors], 1)


def base_fingerprint(model: nn.Module, known: Fingerprints | None = None) -> str:
    """Of all weights and statistics, and of what they do not say: layers and their settings.

    `known` are hashes of tensors that someone took before.
    """
    layers = re.sub("0x[0-9a-f]+", "", repr(model))  # addresses in memory are none of it
    return _hash([layers, (known or Fingerprints()).of(model.state_dict())])


def _hash(facts: list[object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()  # settings in any order
