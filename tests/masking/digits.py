"""A small network for digits, masks on it, and what tests of masked models ask of them."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, get_masked_model

from .architectures import (
    digits_base,
    oracle,
    perturb_scores,
)


def images(seed: int = 0, n: int = 8) -> Tensor:
    return torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def masked_digits(seed: int = 3, **settings: object) -> MaskedModel:
    masked = get_masked_model(digits_base(), MaskConfig(**settings))
    perturb_scores(masked, seed=seed)
    return masked


def saved(path: Path, seed: int, **settings: object) -> Path:
    """A file of a mask of its own, with statistics of its own."""
    masked = masked_digits(seed, **settings)
    masked.train()(images(seed))
    masked.save_pretrained(path)
    return path


def bits_of(masked: MaskedModel) -> np.ndarray:
    return np.concatenate([packed for _, packed in sorted(masked.pack().bits.items())])


def sgd(masked: MaskedModel, lr: float = 5.0, **settings: object) -> torch.optim.SGD:
    return torch.optim.SGD(masked.scores.parameters(), lr=lr, momentum=0.9, **settings)


def expected_gradients(masked: MaskedModel, *xs: Tensor) -> dict[str, Tensor]:
    """The sum over several inputs, each by the oracle on a base with the mask's statistics."""
    base = copy.deepcopy(masked.base)
    parts = [oracle(masked, base, x)[1] for x in xs]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def get_perturbed(base: nn.Module) -> MaskedModel:
    masked = get_masked_model(base)
    perturb_scores(masked)
    return masked.eval()
