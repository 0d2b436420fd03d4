"""Features of images, of the frozen backbone and of the mask on it: each image decoded once, nothing computed twice."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re

import torch
from torch import Tensor, nn

from ..cascade import Cascade
from ..cascade.model import COMBINATIONS, CONDITIONAL, DISPATCHER, FROZEN, UNCONDITIONAL
from ..data import Images
from ..data.sources import FileImages, SomeImages
from ..embedding import Progress, embed
from ..errors import EvaluationError
from ..loading import Embedder
from ..maskfile import Fingerprints
from ..masking import MaskedModel
from .cache import FeatureCache, Vectors, identity, key_of

MASKED, TRAINED = "mask", "trained"
SIDES = {
    **{FROZEN: "frozen backbone", MASKED: "with the mask", TRAINED: "as trained"},
    **{DISPATCHER: "dispatcher", CONDITIONAL: "cascade, conditional", UNCONDITIONAL: "cascade, unconditional"},
}


class BothVectors(nn.Module):
    """The frozen backbone's vector and the mask's, side by side: every image is decoded only once."""

    def __init__(self, masked: MaskedModel) -> None:
        super().__init__()
        self.masked = masked

    def forward(self, images: Tensor) -> Tensor:
        with self.masked.disable_mask():
            before = self.masked(images)
        return torch.cat([before, self.masked(images)], 1)


class CascadeVectors(nn.Module):
    """Several sides of a cascade, side by side: no network is run twice on an image."""

    def __init__(self, cascade: Cascade, sides: list[str]) -> None:
        super().__init__()
        self.cascade, self.sides = cascade, sides

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat(self.cascade.vectors(images, self.sides), 1)


def extract(
    embedder: Embedder,
    images: Images,
    *,
    batch_size: int = 64,
    cache: FeatureCache | None = None,
    progress: Progress | None = None,
) -> dict[str, Vectors]:
    """Features of the frozen backbone, and of the mask, or the cascade. What the cache has is taken from it."""
    if cache is None:
        return _computed(embedder, images, sides_of(embedder), batch_size, progress)
    content = identity(images, progress)
    keys = {side: key_of(fingerprint, content) for side, fingerprint in fingerprints(embedder).items()}
    found = {side: vectors for side, key in keys.items() if (vectors := cache.get(key)) is not None}
    missing = [side for side in keys if side not in found]
    if missing:
        new = _computed(embedder, images, missing, batch_size, progress)
        # A file that was changed while we read it could have been read before or after.
        files = images.images if isinstance(images, SomeImages) else images
        if not isinstance(files, FileImages) or identity(images) == content:
            for side, vectors in new.items():
                cache.put(keys[side], vectors)
        found |= new
    if len({tuple(vectors.kept) for vectors in found.values()}) > 1:  # an image was readable one time and not another
        return _computed(embedder, images, sides_of(embedder), batch_size, progress)
    return {side: found[side] for side in keys}


def sides_of(embedder: Embedder) -> list[str]:
    if isinstance(embedder.model, Cascade):
        return [FROZEN, DISPATCHER, *COMBINATIONS]
    if isinstance(embedder.model, MaskedModel):
        return [FROZEN, MASKED]
    return [TRAINED if embedder.is_tuned else FROZEN]


def fingerprints(embedder: Embedder) -> dict[str, str]:
    """A hash for each side of all that its vectors depend on, but the images."""
    model = embedder.model
    how = [dataclasses.asdict(embedder.preprocessing), next(model.parameters(), torch.empty(0)).device.type]
    if isinstance(model, Cascade):
        own: list[object] = [_shape(model.masked.base), Fingerprints().of(model.masked.base.state_dict()), *how]
        found = {FROZEN: _hash(own), DISPATCHER: _hash([*own, DISPATCHER, model.mask_identity(DISPATCHER)])}
        return found | {side: _hash([*own, side, model.fingerprint]) for side in COMBINATIONS}
    if not isinstance(model, MaskedModel):
        return {sides_of(embedder)[0]: _hash([_shape(model), Fingerprints().of(model.state_dict()), *how])}
    base: list[object] = [_shape(model.base), Fingerprints().of(model.base.state_dict()), *how]
    return {FROZEN: _hash(base), MASKED: _hash([*base, embedder.fingerprint, model.pack().config])}


def _shape(model: nn.Module) -> str:
    """What the weights do not say: layers and their settings. Addresses in memory are none of it."""
    return re.sub("0x[0-9a-f]+", "", repr(model))


def _hash(facts: list[object]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _computed(
    embedder: Embedder, images: Images, sides: list[str], batch_size: int, progress: Progress | None
) -> dict[str, Vectors]:
    model: nn.Module = embedder.model
    if isinstance(model, Cascade):
        model = CascadeVectors(model, sides)
    elif isinstance(model, MaskedModel):
        model = BothVectors(model) if len(sides) == 2 else {FROZEN: model.base, MASKED: model}[sides[0]]
    rows, kept = embed(model, images, embedder.preprocessing, batch_size=batch_size, progress=progress)
    if not kept:
        raise EvaluationError(f"none of the {len(images):,} images could be read", todo="check what was given as data")
    return {side: Vectors(part.contiguous(), kept) for side, part in zip(sides, rows.chunk(len(sides), 1), strict=True)}
