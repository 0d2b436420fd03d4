"""Cascade: a dispatcher, a router and experts on one frozen base."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..data import open_images
from ..embedding.embedder import FROZEN, base_fingerprint
from ..embedding.vectors import Progress, embed
from ..errors import ConfigError, CorruptCascadeError
from ..maskfile import Fingerprints, Source
from ..masking import MaskedModel
from ..preprocessing import Preprocessing
from ..running import as_vectors
from .combination import COMBINATIONS, CONDITIONAL, UNCONDITIONAL, Combination
from .config import ScaleName
from .file import OpenedCascade, open_cascade, write_cascade
from .router import Router

DISPATCHER = "dispatcher"
BATCH = 512
"""Images to group by expert: the more, the less it matters that masks are switched and that some groups are small."""
_AT_ONCE = 128  # images in a forward pass


def expert_name(index: int) -> str:
    return f"expert {index}"


class Cascade(nn.Module):
    """Maps each image to one vector, as long as the dispatcher's, from the features of dispatcher and experts.

    `combination` chooses the networks: "conditional" runs the dispatcher and the expert that the router chooses (two
    passes of the backbone per image); "unconditional" runs the dispatcher and all experts. `scale` is as in
    `CascadeConfig`.

    >>> cascade = selfmask.fit_cascade(model, "photos/", out="runs/photos")
    >>> vectors = cascade.embed("photos/")
    >>> cascade = Cascade.load(model, "runs/photos/cascade.smn")
    """

    def __init__(
        self,
        masked: MaskedModel,
        router: Router,
        combinations: Mapping[str, Combination],
        preprocessing: Preprocessing,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """masked: with the masks "dispatcher", "expert 0", "expert 1" and so on. settings: what a file says of it."""
        super().__init__()
        self.masked, self.router, self.combinations = masked, router, dict(combinations)
        self.preprocessing, self.settings = preprocessing, dict(settings or {})
        self.combination = CONDITIONAL
        if (scale := self.settings.get("scale", "whiten")) in get_args(ScaleName):
            self.scale = scale

    @property
    def scale(self) -> ScaleName:
        """The scaling of the combined vectors; see `CascadeConfig`."""
        return next(iter(self.combinations.values())).scale

    @scale.setter
    def scale(self, scale: ScaleName) -> None:
        if scale not in get_args(ScaleName):
            raise ConfigError("unknown scale", expected=" or ".join(get_args(ScaleName)), found=scale)
        self.combinations = {name: dataclasses.replace(each, scale=scale) for name, each in self.combinations.items()}

    @property
    def variants(self) -> dict[str, str]:
        return {
            FROZEN: "frozen backbone",
            DISPATCHER: "dispatcher",
            CONDITIONAL: "cascade, conditional",
            UNCONDITIONAL: "cascade, unconditional",
        }

    @property
    def experts(self) -> int:
        return self.router.experts

    @property
    def width(self) -> int:
        return len(self.router.mean)

    # ---- files -------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> int:
        """Write the cascade to one file, atomically, and return its size in bytes."""
        masks = []
        for name in [DISPATCHER, *map(expert_name, range(self.experts))]:
            with self.masked.using(name):
                masks.append(self.masked.mask_bytes(relative_to=None if name == DISPATCHER else DISPATCHER))
        return write_cascade(
            path,
            masks=masks,
            router=self.router.tensors(),
            combinations={name: self.combinations[name].tensors() for name in COMBINATIONS},
            width=self.width,
            settings={**self.settings, "scale": self.scale},
        )

    @staticmethod
    def load(model: nn.Module, path: Source | OpenedCascade, *, size: int | None = None) -> Cascade:
        """Load a cascade from a file onto its base, in eval mode. Loading never executes code from the file.

        `path` may also be the bytes of a file, or an open file (`cascade.file.OpenedCascade`). `size` is that of the
        images, where it is to be another than the file says, or far larger than the base's own.
        """
        opened = path if isinstance(path, OpenedCascade) else open_cascade(path)
        first, *others = opened.masks
        with opened.reading(0):
            masked = MaskedModel.from_pretrained(model, first, name=DISPATCHER, size=size)
        for number, mask in enumerate(others):
            with opened.reading(1 + number):
                masked.load_mask(mask, expert_name(number))
        if (preprocessing := masked.preprocessing) is None:
            raise CorruptCascadeError("the dispatcher does not store its preprocessing", expected="preprocessing")
        device = next(masked.base.parameters()).device
        return Cascade(masked, opened.router, opened.combinations, preprocessing, opened.settings).eval().to(device)

    # ---- images -----------------------------------------------------------------------------------------------

    def embed(
        self,
        images: Any,
        *,
        combination: str | None = None,
        batch_size: int = BATCH,
        progress: Progress | None = None,
    ) -> Tensor:
        """One row per image; `images` is anything that `adapt` accepts. Rows of unreadable images are NaN."""
        combination = self._known(combination or self.combination)
        return self._all(
            lambda pixels: self.vectors(pixels, [combination])[0], self.width, images, batch_size, progress
        )

    def route(self, images: Any, *, batch_size: int = BATCH, progress: Progress | None = None) -> Tensor:
        """The number of the expert for each image; -1 for unreadable images."""
        chosen = self._all(
            lambda pixels: self.router(self._run(DISPATCHER, pixels))[:, None], 1, images, batch_size, progress
        )
        return chosen[:, 0].nan_to_num(-1).long()

    def _all(
        self, run: Callable[[Tensor], Tensor], width: int, images: Any, batch_size: int, progress: Progress | None
    ) -> Tensor:
        source = open_images(images)
        rows, kept = embed(_Call(self, run), source, self.preprocessing, batch_size=batch_size, progress=progress)
        result = torch.full((len(source), width), torch.nan)
        if kept:
            result[kept] = rows
        return result

    def forward(self, pixels: Tensor) -> Tensor:
        """Combined vectors of normalised images."""
        return self.vectors(pixels, [self._known(self.combination)])[0]

    def vectors(self, pixels: Tensor, variants: Sequence[str]) -> list[Tensor]:
        """The vectors of each variant: frozen, dispatcher, or a combination. No network is run twice on an image."""
        found: dict[str, Tensor] = {}
        if FROZEN in variants:
            with self.masked.disable_mask():
                found[FROZEN] = as_vectors(self.masked(pixels)).float()
        if set(variants) - {FROZEN}:
            found[DISPATCHER] = first = self._run(DISPATCHER, pixels)
            if UNCONDITIONAL in variants:
                every = {k: self._run(expert_name(k), pixels) for k in range(self.experts)}
                found[UNCONDITIONAL] = self.combinations[UNCONDITIONAL](first, every)
                if CONDITIONAL in variants:
                    found[CONDITIONAL] = self._conditional(first, lambda k, chosen: every[k][chosen])
            elif CONDITIONAL in variants:
                found[CONDITIONAL] = self._conditional(
                    first, lambda k, chosen: self._run(expert_name(k), pixels[chosen])
                )
        return [found[variant] for variant in variants]

    def _conditional(self, dispatcher: Tensor, features: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Grouped by expert: `features` gives those of an expert for the images with these numbers."""
        combine, route = self.combinations[CONDITIONAL], self.router(dispatcher)
        combined = torch.empty_like(dispatcher)
        for k in sorted(set(route.tolist())):
            chosen = (route == k).nonzero()[:, 0]
            combined[chosen] = combine(dispatcher[chosen], {k: features(k, chosen)})
        return combined

    def _run(self, mask: str, pixels: Tensor) -> Tensor:
        with self._masked_by(mask) as model:
            features = torch.cat([as_vectors(model(part)).float() for part in torch.split(pixels, _AT_ONCE)])
        if features.shape[1] != self.width:
            raise CorruptCascadeError(
                "the cascade was made for a base with another number of features",
                expected=self.width,
                found=features.shape[1],
            )
        return features

    @contextmanager
    def _masked_by(self, mask: str) -> Iterator[nn.Module]:
        """The base with a mask in place, for as long as it is used."""
        with self.masked.lock, self.masked.using(mask):  # held for all parts: no other thread switches in between
            yield self.masked

    def _known(self, combination: str) -> str:
        if combination not in self.combinations:
            raise ConfigError("unknown combination", expected=" or ".join(self.combinations), found=combination)
        return combination

    # ---- being an ordinary module -----------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Cascade:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = next(self.masked.base.parameters()).device
        self.router = self.router.to(device)
        self.combinations = {name: each.to(device) for name, each in self.combinations.items()}
        return self

    def fingerprint(self, variant: str) -> str:
        """A hash of all that the vectors of a variant depend on, but images and preprocessing."""
        with self.masked.lock:
            base = base_fingerprint(self.masked.base, self.masked.fingerprints)
        if variant == FROZEN:
            return base
        masks = [self.mask_identity(DISPATCHER)]
        if variant == DISPATCHER:
            return _hash([base, *masks])
        masks += [self.mask_identity(expert_name(k)) for k in range(self.experts)]
        maps = Fingerprints().of(
            {f"router.{name}": value for name, value in self.router.tensors().items()}
            | {f"{variant}.{name}": value for name, value in self.combinations[variant].tensors().items()}
        )
        return _hash([base, *masks, maps, self.scale, variant])

    def mask_identity(self, name: str) -> str:
        """A hash of a mask's bits and statistics."""
        with self.masked.using(name):
            mask = self.masked.pack()
        return mask.sha256 + Fingerprints().of(mask.norm)


class _Call(nn.Module):
    """A function of a cascade, where a module is wanted."""

    def __init__(self, cascade: Cascade, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.cascade, self.run = cascade, run

    def forward(self, pixels: Tensor) -> Tensor:
        return self.run(pixels)


def _hash(facts: list[str]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
