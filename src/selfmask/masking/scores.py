"""Scores: how they start, and which weights carry one."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .config import MaskConfig
from .rules import top_share


def initial_scores(weight: Tensor, config: MaskConfig, generator: torch.Generator) -> Tensor:
    """S0 for one tensor, always float32: steps from 1 that bfloat16 would round away must add up."""
    scores = torch.full_like(weight, config.s0, dtype=torch.float32, requires_grad=False)
    if config.score_init == "kaiming":
        # kaiming_uniform_(a=sqrt 5) is U(-1, 1)/sqrt(fan_in); written out because it refuses 1-d tensors.
        fan_in = weight[0].numel() if weight.dim() > 1 else weight.numel()
        random = torch.rand(weight.shape, generator=generator).mul_(2).sub_(1).div_(max(fan_in, 1) ** 0.5)
        scores.copy_(random)
    return scores


def choose_fraction(name: str, weight: Tensor, config: MaskConfig) -> Tensor | None:
    """Which weights of a tensor carry a score, or None for all of them.

    A mask file stores bits for the chosen weights only, so every reader must make the same choice for ever:
    `docs/format.md` specifies both ways, and SplitMix64 is short enough to specify (library generators may
    change their streams between releases).
    """
    if config.fraction >= 1:
        return None
    if config.fraction_by == "random":
        uniform = _splitmix64(f"{config.seed}:{name}", weight.numel()) >> np.uint64(11)
        chosen = torch.from_numpy(uniform < round(config.fraction * 2**53))
    else:
        chosen = top_share(weight.detach().abs().float().flatten().cpu(), config.fraction)
    return chosen.view(weight.shape).to(weight.device)


def _splitmix64(key: str, n: int) -> npt.NDArray[np.uint64]:
    """n pseudo-random 64-bit numbers, seeded by a text."""
    start = np.frombuffer(hashlib.sha256(key.encode()).digest()[:8], dtype="<u8")[0]
    z = start + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.asarray(z, np.uint64)
