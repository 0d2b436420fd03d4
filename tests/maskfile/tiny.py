"""A tiny base that is the same for ever, and masks on it: from integer formulas, not from a library's generator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, get_masked_model

Flags = npt.NDArray[np.bool_]


def uniform(n: int, seed: int) -> npt.NDArray[np.float64]:
    """n numbers in [0, 1) with 24 bits each: SplitMix64, so that float32 holds them exactly."""
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        seed * 0x632BE59BD9B4E019 % 2**64
    )
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(40)).astype(np.float64) / 2**24


class Tiny(nn.Module):
    """2,952 weights to mask, one batch norm, and a first linear layer that is no classifier."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 24, 3, bias=False)
        self.proj = nn.Linear(24, 40)
        with torch.no_grad():
            for i, (name, value) in enumerate(sorted(self.state_dict().items())):
                if value.is_floating_point():
                    numbers = uniform(value.numel(), seed=100 * seed + i)
                    # u^3 has many small and few large values, as weights do; norm scales and variances stay positive.
                    positive = name in ("norm.weight", "norm.running_var")
                    numbers = numbers + 0.5 if positive else (2 * numbers - 1) ** 3
                    value.copy_(torch.from_numpy(numbers.astype(np.float32)).view(value.shape))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv1(x)).relu()
        return self.proj(self.conv2(x).relu().mean((2, 3)))


def images() -> Tensor:
    """A fixed batch for `Tiny`."""
    return torch.from_numpy((uniform(2 * 3 * 81, seed=7) - 0.5).astype(np.float32)).view(2, 3, 9, 9)


def flags(kind: str, weight: Tensor, seed: int = 0) -> Flags:
    """Which weights of one tensor are on, flat."""
    n = weight.numel()
    random = uniform(n, seed + 1000)
    if kind == "sparse":  # few off: rice
        return random >= 0.04
    if kind == "large":  # large weights go off, as training does: rice with classes
        magnitude = weight.detach().float().abs().flatten().cpu().numpy()
        return random >= np.where(magnitude > 0.5, 0.45, np.where(magnitude > 0.1, 0.05, 0.002))
    if kind == "dense":  # a coin each: raw
        return random >= 0.5
    if kind == "stripes":  # a pattern only lzma sees
        return np.arange(n) % 3 != 1
    if kind in ("on", "off"):
        return np.full(n, kind == "on")
    raise ValueError(kind)


def masked_with(base: nn.Module, kind: str = "sparse", variant: int = 0, **config: object) -> MaskedModel:
    """A masked model whose mask is `flags(kind)` of every tensor."""
    masked = get_masked_model(base, MaskConfig(**config))  # type: ignore[arg-type]
    weights = {key: base.get_parameter(key.replace("/", ".")) for key in masked.scores}
    set_flags(masked, {key: flags(kind, weight, variant + i) for i, (key, weight) in enumerate(weights.items())})
    return masked


def set_flags(masked: MaskedModel, on: Mapping[str, Flags]) -> None:
    """Score +1 where on and -1 where off."""
    with torch.no_grad():
        for key, score in masked.scores.items():
            score.copy_(torch.from_numpy(on[key]).view(score.shape).to(score.dtype) * 2 - 1)
