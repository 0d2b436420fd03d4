"""What all cells of a comparison share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from ..backbones import Backbone
from ..data import Images
from ..training.display import StagesDisplay
from .adapt import AdaptResult, adapt
from .adapt_config import AdaptConfig


@dataclasses.dataclass(frozen=True)
class Job:
    """Backbone and images, and where results go.

    load: makes the backbone anew; methods change it.
    """

    load: Callable[[], Backbone]
    images: Images
    folder: Path
    display: StagesDisplay
    weights: str | None
    max_bad: float

    def adapted(self, backbone: Backbone, config: AdaptConfig, out: Path, *, report: bool = True) -> AdaptResult:
        """Adapt to all training images without labels, or take what is there."""
        return adapt(
            backbone.model,
            self.images,
            config,
            out=out,
            resume=True,
            preprocessing=backbone.preprocessing,
            about={"backbone": backbone.name, "weights": self.weights},
            max_bad=self.max_bad,
            report=report,
            display=self.display,
        )
