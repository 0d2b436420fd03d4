"""What a backbone sees where: features of the stage before its last, at 4 x 4 places.

The vector of an image is a mean over places, and of what the last stage makes of them. Images of one kind are alike in
more than that: parts lie in the same places. So a teacher that looks at both finds neighbours of the same kind more
often (docs/recipe.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..objectives.principal import principal
from ..running import as_vectors

_SIDE = 4  # places in a row
_CHANNELS = 64  # kept at each place: principal directions of the first images; more find no better neighbours


class Layout:
    """The vectors of a network, each followed by what an earlier stage sees where; `features` tells them apart.

    base: the network, whose modules are looked at.
    run: how it is run.
    """

    def __init__(self, base: nn.Module, run: Callable[[Tensor], Any]) -> None:
        self._base, self._run = base, run
        self._at: str | None = None
        self._axes: Tensor | None = None
        self.features = 0

    def __call__(self, images: Tensor) -> Tensor:
        if not self.features:
            self._at = earlier_stage(self._base, self._run, images[:2])
        seen: list[Tensor] = []
        handle = None if self._at is None else _watch(self._base.get_submodule(self._at), seen.append)
        try:
            vectors = as_vectors(self._run(images))
        finally:
            if handle is not None:
                handle.remove()
        self.features = vectors.shape[1]
        if not seen:
            return vectors
        maps = F.adaptive_avg_pool2d(channels_first(seen[-1]).float(), _SIDE)
        places = maps.flatten(2).transpose(1, 2)  # [images, places, channels]
        if self._axes is None:
            self._axes = principal(places.flatten(0, 1))[1][:, :_CHANNELS]
        return torch.cat([vectors.float(), (places @ self._axes).flatten(1)], 1)


def earlier_stage(base: nn.Module, run: Callable[[Tensor], Any], images: Tensor) -> str | None:
    """The module that ends the stage before the last: its maps are the next larger ones than those of the last.

    None in a network whose maps, or tokens, are of one size throughout.
    """
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda maps: seen.append((name, channels_first(maps)[0, 0].numel()))

    handles = [_watch(module, note(name)) for name, module in base.named_modules() if name]
    try:
        run(images)
    finally:
        for handle in handles:
            handle.remove()
    seen = [(name, size) for name, size in seen if size > 1]  # what is pooled is of no stage
    larger = [size for _, size in seen if size > seen[-1][1]]
    # Several modules put out maps of that size; the outermost that is run last is the stage as a whole.
    ends = [name for name, size in reversed(seen) if larger and size == min(larger)]
    return min(ends, key=lambda name: name.count("."), default=None)


def channels_first(maps: Tensor) -> Tensor:
    """Maps as [B, C, H, W]. Some networks have them as [B, H, W, C]: of square images, equal sides come first there."""
    first, second, third = maps.shape[1:]
    return maps.movedim(3, 1) if first == second != third else maps


def _watch(module: nn.Module, see: Callable[[Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4:
            see(output.detach())

    return module.register_forward_hook(hook)
