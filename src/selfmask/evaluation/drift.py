"""Have images drifted? A classifier is asked to tell the new from the old; what it cannot, it guesses.

This is the classifier two-sample test (Lopez-Paz and Oquab 2017): a linear probe of the vectors learns from half of
both sets, and the other half says how often it is right; then the halves change places. 0.5 is a guess: nothing has
drifted that these vectors show. It is a rate with a known error, whatever the backbone, in words anybody understands.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from scipy.special import bdtrc  # type: ignore[import-untyped]
from torch import Tensor

from ..errors import EvaluationError
from .inputs import check_features
from .probe import linear_probe_fit

LEAST = 20
"""Images of each kind, at least: fewer prove nothing."""
_PENALTY = 1.0  # strong: vectors are long, and images few


@dataclasses.dataclass(frozen=True)
class Drift:
    """How well old and new images are told apart.

    rate: share of held-back images that the classifier puts in the right set; 0.5 is a guess, 1 no overlap.
    error: standard error of the rate.
    chance: probability of such a rate, or a higher one, where nothing has drifted.
    images: how many of each set were compared.
    """

    rate: float
    error: float
    chance: float
    images: int

    def proven(self, mistakes: float = 0.01) -> bool:
        return self.chance < mistakes


def drift_between(old: Tensor, new: Tensor, *, seed: int = 0) -> Drift:
    """Of vectors [n, width] of both; as many of each are taken as the smaller set has."""
    old, new = check_features(old, "the old images"), check_features(new, "the new images")
    count = min(len(old), len(new)) // 2 * 2
    if count < LEAST:
        raise EvaluationError(
            "there are too few images to tell drift from luck",
            expected=f"at least {LEAST} old ones and {LEAST} new ones",
            found=f"{len(old):,} and {len(new):,}",
            todo="add images",
        )
    draws = torch.Generator().manual_seed(seed)
    halves = [rows[torch.randperm(len(rows), generator=draws)[:count]].chunk(2) for rows in (old, new)]
    labels = torch.arange(2).repeat_interleave(count // 2)
    right = 0
    for learned in (0, 1):
        rows, others = (torch.cat([each[half] for each in halves]) for half in (learned, 1 - learned))
        mean, scale = rows.mean(0), rows.std(0).clamp_min(1e-6)  # a probe takes directions, and these are all alike
        probe = linear_probe_fit((rows - mean) / scale, labels, penalty=_PENALTY)
        right += int((probe.rank((others - mean) / scale)[:, 0].cpu() == labels).sum())
    tries = 2 * count
    rate = right / tries
    # The two halves learn from each other's images, so the tries are not quite independent; half of them count.
    return Drift(rate, math.sqrt(rate * (1 - rate) / tries), float(bdtrc(right // 2 - 1, tries // 2, 0.5)), count)
