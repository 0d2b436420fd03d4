"""The adaptations of a cascade: the dispatcher's, and one for each expert."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ...data import Images
from ...data.sources import SomeImages
from ...errors import ConfigError
from ...training.display import Display, QuietDisplay
from ...training.start import Start
from ..adapt import adapt
from ..adapt_config import AdaptConfig
from .job import Job, check_begun


def train_expert(job: Job, index: int, display: Display | None = None) -> dict[str, Any]:
    """One expert, and no other; what it came to."""
    if not 0 <= index < job.config.experts:
        raise ConfigError("there is no such expert", expected=f"0 to {job.config.experts - 1}", found=index)
    check_begun(job)
    clusters = job.clusters()
    own = clusters.members(index)
    config = job.config.expert(index, len(clusters.numbers), len(own))
    return run_adapt(job, SomeImages(job.images, own), config, job.expert(index), display, Start.of(job.dispatcher))


def run_adapt(
    job: Job, images: Images, config: AdaptConfig, where: Path, display: Display | None, start: Start | None = None
) -> dict[str, Any]:
    """Adapt in a folder of the cascade, or go on there; what it came to."""
    preprocessing = job.preprocessing
    if start is not None:  # experts see images as the dispatcher does
        preprocessing, config = start.preprocessing, dataclasses.replace(config, size=None)
    return adapt(
        job.model,
        images,
        config,
        out=where,
        resume=True,
        preprocessing=preprocessing,
        about={key: value for key, value in job.about.items() if key in ("backbone", "weights")},
        max_bad=job.max_bad,
        start=start,
        report=start is None,
        display=display or QuietDisplay(),
    ).result
