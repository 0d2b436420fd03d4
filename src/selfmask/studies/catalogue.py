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
    length,
    low_shot,
    progressive,
    rules,
    selective,
    sparsity,
    supervised,
    variance,
)
from . import study as known
from .study import Study

# What others share comes first, and what takes long last: where time is short, most of them are finished.
_ORDER = (
    "rules",
    "supervised",
    "invariance",
    "compression",
    "sparsity",
    "progressive",
    "low-shot",
    "cascade",
    "clusters",
    "cost",
    "variance",
    "length",
    "ablations",
    "selective",
)
STUDIES: dict[str, Study] = {name: known.STUDIES[name] for name in _ORDER}


def study_named(name: str) -> Study:
    if name not in STUDIES:
        close = difflib.get_close_matches(name, STUDIES, n=2, cutoff=0.5)
        raise ConfigError(
            f"there is no study {name!r}",
            expected=", ".join(STUDIES),
            todo=f"did you mean {' or '.join(close)}?" if close else "see `selfmask study list`",
        )
    return STUDIES[name]
