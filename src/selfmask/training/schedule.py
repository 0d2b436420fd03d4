"""Learning-rate schedules: a factor for every step, so that a resumed run needs only the step."""

from __future__ import annotations

import math


def cosine(progress: float, warmup: float = 0.0) -> float:
    """A linear rise over the first `warmup` share of the run, then half a cosine down to 0.

    `progress` is the share done, from 0 to below 1. The rise starts above zero only if `progress` does: give the
    middle of a step, (step + 1/2) / steps, and no step is lost to a rate of zero.
    """
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
