"""All studies there are, by name."""

from __future__ import annotations

import difflib

from ..errors import ConfigError
from . import (  # noqa: F401  # they register
    ablations,
    cascade,
    clusters,
    compression,
    cost,
    invariance,
    low_shot,
    progressive,
    rules,
    selective,
    sparsity,
    supervised,
    variance,
)
from .study import STUDIES, Study

__all__ = ["STUDIES", "study_named"]


def study_named(name: str) -> Study:
    if name not in STUDIES:
        close = difflib.get_close_matches(name, STUDIES, n=2, cutoff=0.5)
        raise ConfigError(
            f"there is no study {name!r}",
            expected=", ".join(STUDIES),
            todo=f"did you mean {' or '.join(close)}?" if close else "see `selfmask study list`",
        )
    return STUDIES[name]
