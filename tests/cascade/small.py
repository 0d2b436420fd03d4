"""A cascade on a network that runs in milliseconds, with masks that were not trained but set."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from selfmask import Cascade, CascadeConfig, MaskConfig, MaskedModel
from selfmask.cascade.combination import Combination, columns_of
from selfmask.cascade.model import CONDITIONAL, DISPATCHER, UNCONDITIONAL, expert_name
from selfmask.cascade.router import Router
from selfmask.data import Images, SomeImages, open_images
from selfmask.data.pixels import fit, normalised
from selfmask.evaluation.moments import Moments
from tests.maskfile.tiny import masked_with
from tests.training.small import HOW, config, network

WIDTH, EXPERTS = 16, 3


def clothes(count: int) -> Images:
    """The first of the bundled pictures."""
    return SomeImages(open_images("selfmask/fashion"), range(count))


@cache
def pixels(count: int) -> Tensor:
    """The same, as the network takes them."""
    images = clothes(count)
    return torch.stack([normalised(fit(images[i], HOW), HOW) for i in range(count)])


def cascade_config(**changes: Any) -> CascadeConfig:
    """Of a cascade that is trained in seconds; settings of adaptations may be changed, too."""
    own = {key: changes.pop(key) for key in ("experts", "router", "components", "scale") if key in changes}
    return CascadeConfig(**{"experts": EXPERTS, "components": 6, **own}, adapt=config(**{"steps": 6, **changes}))


def save_masks(folder: Path, base: nn.Module, experts: int = EXPERTS) -> dict[str, Path]:
    """A dispatcher's mask and, unlike it in some weights, those of experts."""
    files = {}
    for number, name in enumerate([DISPATCHER, *map(expert_name, range(experts))]):
        masked = masked_with(base, "sparse", 50 * number, select="all", exclude=("*.bias", "1.*"))
        masked.preprocessing = HOW
        files[name] = folder / f"{number}.smn"
        masked.save_pretrained(files[name])
    return files


def load_masks(base: nn.Module, files: dict[str, Path]) -> MaskedModel:
    masked = MaskedModel.from_pretrained(base, files[DISPATCHER], name=DISPATCHER)
    for name, file in files.items():
        if name != DISPATCHER:
            masked.load_mask(file, name)
    return masked.eval()


def features(masked: MaskedModel, images: Tensor, name: str) -> Tensor:
    masked.set_mask(name)
    with torch.no_grad():
        return masked(images).clone()


def fitted(folder: Path, base: nn.Module | None = None, experts: int = EXPERTS, images: int = 200) -> Cascade:
    """A whole cascade, fitted to some pictures by the parts that `fit_cascade` uses."""
    base = base or network().eval()
    masked, seen = load_masks(base, save_masks(folder, base, experts)), pixels(images)
    dispatcher = features(masked, seen, DISPATCHER)
    router = Router.fit(dispatcher, cascade_config(experts=experts))
    rows = torch.cat([features(masked, seen, name) for name in [DISPATCHER, *map(expert_name, range(experts))]], 1)
    unconditional, conditional = Moments(rows.shape[1]), Moments(rows.shape[1])
    unconditional.add(rows)
    route = router(dispatcher)
    for k in range(experts):
        columns = columns_of([0, 1 + k], WIDTH)
        conditional.add(rows[route == k][:, columns], columns)
    combinations = {
        CONDITIONAL: Combination.fit(conditional, WIDTH),
        UNCONDITIONAL: Combination.fit(unconditional, WIDTH),
    }
    return Cascade(masked, router, combinations, HOW, {"router": "gmm"}).eval()


def as_numpy(tensor: Tensor) -> Any:
    return np.asarray(tensor.double())


__all__ = ["MaskConfig", "as_numpy", "cascade_config", "clothes", "features", "fitted", "load_masks", "pixels"]
