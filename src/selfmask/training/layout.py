"""What a backbone sees where: features of the stage before its last, or of a late block of tokens, at 4 x 4 places.

The vector of an image is a mean over places, and of what the last stage makes of them. Images of one kind are alike in
more than that: parts lie in the same places. So a teacher that looks at both finds neighbours of the same kind more
often (docs/recipe.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..objectives.principal import principal
from ..running import as_vectors

_SIDE = 4  # places in a row
_CHANNELS = 64  # kept at each place: principal directions of the first images; more find no better neighbours
_OTHERS = 8  # at most, tokens before those of places: one for the class, one for distillation, registers
_BLOCK = re.compile(r"(.*)\.\w*?\d+")  # the list that it is in, and its number
_DEPTH = 0.75  # of the blocks of a transformer: what is seen where is there still, and has been compared already


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
        watched = {} if self._at is None else {self._at: self._base.get_submodule(self._at)}
        with _watched(watched, lambda name, output: seen.append(output)):
            vectors = as_vectors(self._run(images))
        self.features = vectors.shape[1]
        if not seen:
            return vectors
        maps = F.adaptive_avg_pool2d(as_maps(seen[-1]).float(), _SIDE)
        places = maps.flatten(2).transpose(1, 2)  # [images, places, channels]
        if self._axes is None:
            self._axes = principal(places.flatten(0, 1))[1][:, :_CHANNELS]
        return torch.cat([vectors.float(), (places @ self._axes).flatten(1)], 1)


def earlier_stage(base: nn.Module, run: Callable[[Tensor], Any], images: Tensor) -> str | None:
    """The module that ends the stage before the last: its maps are the next larger ones than those of the last.

    Of a network whose maps, or tokens, are of one size throughout, the block after which three quarters of the blocks
    are done. None if it has neither.
    """
    sizes, shapes = list[tuple[str, int]](), list[tuple[str, torch.Size]]()

    def note(name: str, output: Tensor) -> None:
        if output.ndim == 4:
            sizes.append((name, as_maps(output)[0, 0].numel()))
        if len(output) == len(images) and (output.ndim == 4 or _side(output.shape[1])):
            shapes.append((name, as_maps(output).shape))

    with _watched({name: module for name, module in base.named_modules() if name}, note):
        run(images)
    return _before_the_last(sizes) or _late_block(shapes)


def _before_the_last(seen: list[tuple[str, int]]) -> str | None:
    """Of modules and the sizes of their maps, in the order they are run."""
    seen = [(name, size) for name, size in seen if size > 1]  # what is pooled is of no stage
    larger = [size for _, size in seen if size > seen[-1][1]]
    # Several modules put out maps of that size; the outermost that is run last is the stage as a whole.
    ends = [name for name, size in reversed(seen) if larger and size == min(larger)]
    return min(ends, key=lambda name: name.count("."), default=None)


def _late_block(seen: list[tuple[str, torch.Size]]) -> str | None:
    """Of modules and the shapes of their maps, in the order they are run. Blocks are numbered members of one list that
    is not itself in a block."""
    lists: dict[str, dict[str, torch.Size]] = {}
    for name, shape in seen:
        if shape[2] * shape[3] > 1 and (match := _BLOCK.fullmatch(name)):
            lists.setdefault(match[1], {})[name] = shape
    alike = {of: blocks for of, blocks in lists.items() if len(set(blocks.values())) == 1}
    trunk = min(alike, key=lambda of: (of.count("."), -len(alike[of])), default=None)
    return None if trunk is None else list(alike[trunk])[math.ceil(_DEPTH * len(alike[trunk])) - 1]


def as_maps(output: Tensor) -> Tensor:
    """Maps, or tokens [B, N, C] of places in rows, as [B, C, H, W]. Some networks have maps as [B, H, W, C]: of square
    images, equal sides come first there."""
    if output.ndim == 3:
        side = _side(output.shape[1])
        return output[:, -side * side :].mT.reshape(len(output), -1, side, side)
    first, second, third = output.shape[1:]
    return output.movedim(3, 1) if first == second != third else output


def _side(tokens: int) -> int:
    """How many places are in a row, if so many tokens are those of a square and a few others before them; else 0."""
    side = math.isqrt(tokens)
    return side if tokens - side * side <= _OTHERS else 0


@contextmanager
def _watched(modules: dict[str, nn.Module], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within, be told what maps and tokens these modules put out."""

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def told(module: nn.Module, inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) and output else output
            if isinstance(output, Tensor) and output.ndim in (3, 4):
                see(name, output.detach())

        return told

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
