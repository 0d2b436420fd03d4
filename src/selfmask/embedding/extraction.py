"""Features of images in every variant of a model: each image decoded once, nothing computed twice."""

from __future__ import annotations

from ..data import Images
from ..data.identity import Unchanged
from ..errors import EvaluationError
from .cache import FeatureCache, Vectors, key_of
from .embedder import Embedder
from .vectors import Progress, embed


def extract(
    embedder: Embedder,
    images: Images,
    *,
    batch_size: int = 64,
    cache: FeatureCache | None = None,
    progress: Progress | None = None,
) -> dict[str, Vectors]:
    """Features in all variants. What the cache has is taken from it."""
    variants = list(embedder.variants.variants)
    if cache is None:
        return _computed(embedder, images, variants, batch_size, progress)
    same = Unchanged(images)
    keys = {variant: key_of(embedder.fingerprint(variant), same.content) for variant in variants}
    found = {variant: vectors for variant, key in keys.items() if (vectors := cache.get(key)) is not None}
    missing = [variant for variant in keys if variant not in found]
    if missing:
        new = _computed(embedder, images, missing, batch_size, progress)
        # An image that was changed while we read it could have been read before or after.
        if same.holds():
            for variant, vectors in new.items():
                cache.put(keys[variant], vectors)
        found |= new
    if len({tuple(vectors.kept) for vectors in found.values()}) > 1:  # an image was readable one time and not another
        return _computed(embedder, images, variants, batch_size, progress)
    return {variant: found[variant] for variant in keys}


def _computed(
    embedder: Embedder, images: Images, variants: list[str], batch_size: int, progress: Progress | None
) -> dict[str, Vectors]:
    model, preprocessing = embedder.module(variants), embedder.preprocessing
    rows, kept = embed(model, images, preprocessing, batch_size=batch_size, progress=progress)
    if not kept:
        raise EvaluationError(f"none of the {len(images):,} images could be read", todo="check the data that was given")
    parts = rows.chunk(len(variants), 1)
    return {variant: Vectors(part.contiguous(), kept) for variant, part in zip(variants, parts, strict=True)}
