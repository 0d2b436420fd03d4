"""Dense features: the tokens or maps inside a network, an array for each image, where an embedder gives vectors."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import EmbedderError
from ..masking import MaskedModel
from ..running import evaluating
from .embedder import Embedder, MaskVariants, PlainVariants

_SHOWN = 8


def dense(embedder: Embedder, layer: str | None = None) -> Embedder:
    """The embedder with the output of a layer in place of its vectors; of none, the tokens of the last.

    Arrays are flattened to rows on their way; `shape` says what they were.
    """
    if not isinstance(embedder.variants, MaskVariants | PlainVariants):
        raise EmbedderError(
            "a cascade has no dense features, because its vectors are made of those of several networks",
            todo="use the mask of one of them: dispatcher/mask.smn in the run folder of the cascade",
        )
    variants = DenseVariants(embedder, layer)
    shape = variants.shape()
    if layer is None and len(shape) != 2:
        raise EmbedderError(
            f"{embedder.name} has no tokens",
            expected="features of shape [tokens, width]",
            found=list(shape),
            todo=f"name a layer: --feature-map LAYER ({', '.join(_top(variants.base))})",
        )
    return dataclasses.replace(
        embedder, variants=variants, variant=variants.name, width=math.prod(shape), shape=shape, head=None
    )


class DenseVariants:
    """The output of one layer, of the variant that the embedder would give."""

    def __init__(self, embedder: Embedder, layer: str | None) -> None:
        self.embedder, self.layer, model = embedder, layer, embedder.model
        self.base: nn.Module = model.base if isinstance(model, MaskedModel) else model
        self.name = "tokens" if layer is None else layer
        self.variants: Mapping[str, str] = {self.name: f"features of {self.name}"}
        if layer is None and not hasattr(self.base, "forward_features"):
            raise EmbedderError(
                f"{embedder.name} does not say which of its features are tokens",
                expected="a network with forward_features, as timm's have it",
                todo=f"name a layer: --feature-map LAYER ({', '.join(_top(self.base))})",
            )
        self._at = None if layer is None else _named(self.base, layer)

    def vectors(self, pixels: Tensor, variants: Sequence[str]) -> list[Tensor]:
        return [self.arrays(pixels).flatten(1) for _ in variants]

    def arrays(self, pixels: Tensor) -> Tensor:
        """[images, ...]"""
        model = self.embedder.model
        if self._at is None:
            run = model.forward_features if isinstance(model, MaskedModel) else self.base.forward_features
            return _checked(run(pixels), len(pixels), self.name)  # type: ignore[operator]
        found = list[Any]()
        handle = self._at.register_forward_hook(lambda module, inputs, output: found.append(output))
        try:
            model(pixels)
        finally:
            handle.remove()
        return _checked(found[-1] if found else None, len(pixels), self.name)

    def shape(self) -> tuple[int, ...]:
        """Of one image's array, found by trying."""
        parameter = next(self.base.parameters())
        pixels = torch.zeros(1, 3, *self.embedder.preprocessing.size, device=parameter.device, dtype=parameter.dtype)
        with torch.inference_mode(), evaluating(self.embedder.model):
            return tuple(self.arrays(pixels).shape[1:])

    def fingerprint(self, variant: str) -> str:
        inner = self.embedder.variants.fingerprint(self.embedder.variant)
        return hashlib.sha256(f"{inner} {self.layer!r}".encode()).hexdigest()


def _checked(output: Any, images: int, name: str) -> Tensor:
    output = output[0] if isinstance(output, tuple | list) and len(output) else output
    if not isinstance(output, Tensor) or output.ndim < 2 or len(output) != images:
        raise EmbedderError(
            f"the output of {name} is not one array an image",
            expected="a tensor of shape [images, ...]",
            found=list(output.shape) if isinstance(output, Tensor) else type(output).__name__,
            todo="name another layer: --feature-map LAYER",
        )
    return output


def _named(base: nn.Module, layer: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(base.named_modules())
    if not layer or layer not in modules:
        near = difflib.get_close_matches(layer, modules, n=_SHOWN, cutoff=0.5)
        raise EmbedderError(
            f"the backbone has no layer {layer!r}",
            expected=f"a name such as {', '.join(near or _top(base))}",
            todo="name a module of the network: --feature-map LAYER",
        )
    return modules[layer]


def _top(base: nn.Module) -> list[str]:
    return [name for name, _ in base.named_children()][:_SHOWN]
