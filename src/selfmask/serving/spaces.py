"""What a collection is indexed with: sources of vectors, and all kinds of vectors of an image made side by side."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..embedding.embedder import FROZEN, Embedder
from ..embedding.mapping import made_for
from ..errors import CollectionError
from ..evaluation.feature_map import FeatureMap


@dataclasses.dataclass(frozen=True)
class Source:
    """What gives vectors to a collection: a run, or a backbone alone.

    whiten: the run's own map. files: what to keep of the run, so that queries can be embedded later.
    """

    name: str
    embedder: Embedder
    whiten: FeatureMap | None = None
    files: Mapping[str, bytes | Path] = dataclasses.field(default_factory=dict)

    @property
    def is_frozen(self) -> bool:
        return self.embedder.variant == FROZEN


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of vectors, and whose they are."""

    name: str
    source: Source
    variant: str

    @property
    def title(self) -> str:
        return self.source.embedder.variants.variants[self.variant]


def kinds_of(sources: Sequence[Source]) -> list[Kind]:
    """The frozen backbone, once, and each source; they must agree on the backbone and on how images are prepared."""
    frozen = [each for each in sources if FROZEN in each.embedder.variants.variants]
    bases = {made_for(each.embedder, FROZEN) for each in frozen}
    if len(bases) > 1 or len({each.embedder.preprocessing for each in sources}) > 1:
        raise CollectionError(
            "these runs cannot be in one collection",
            expected="masks of one backbone, learned with images of one size",
            found=", ".join(
                f"{each.name}: {each.embedder.name} at {each.embedder.preprocessing.size[0]} px" for each in sources
            ),
            todo="index them apart: one --out for each",
        )
    kinds = [Kind(FROZEN, frozen[0], FROZEN)] if frozen else []
    taken = {kind.name for kind in kinds}
    for source in sources:
        if not source.is_frozen:
            name = next(name for name in _names(source.name) if name not in taken)
            taken.add(name)
            kinds.append(Kind(name, source, source.embedder.variant))
    return kinds


def _names(name: str) -> Iterator[str]:
    yield name
    for number in range(2, 10_000):
        yield f"{name}-{number}"


class Together(nn.Module):
    """All kinds of vectors of an image side by side, as one variant: an image is decoded once for all of them."""

    variants: Mapping[str, str] = {"all": "all"}

    def __init__(self, kinds: Sequence[Kind]) -> None:
        super().__init__()
        self.kinds = kinds
        self.models = nn.ModuleList({id(kind.source): kind.source.embedder.model for kind in kinds}.values())

    def each(self, pixels: Tensor) -> list[Tensor]:
        found: dict[tuple[int, str], Tensor] = {}
        for source in {id(kind.source): kind.source for kind in self.kinds}.values():
            names = [kind.variant for kind in self.kinds if kind.source is source]
            for name, vectors in zip(names, source.embedder.variants.vectors(pixels, names), strict=True):
                found[id(source), name] = vectors
        return [found[id(kind.source), kind.variant] for kind in self.kinds]

    def vectors(self, pixels: Tensor, variants: Sequence[str]) -> list[Tensor]:
        return [torch.cat(self.each(pixels), 1) for _ in variants]

    def fingerprint(self, variant: str) -> str:
        facts = [kind.source.embedder.fingerprint(kind.variant) for kind in self.kinds]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def widths(self, size: tuple[int, int]) -> list[int]:
        device = next(self.parameters(), torch.empty(0)).device
        with torch.inference_mode():
            return [vectors.shape[1] for vectors in self.each(torch.zeros(1, 3, *size, device=device))]
