"""The shape of a cascade: how many experts, who routes to them, and how their vectors are scaled."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from ..errors import ConfigError

RouterName = Literal["gmm", "gmm-nearest", "kmeans"]
ScaleName = Literal["whiten", "none", "eigenvalues"]
MAX_EXPERTS = 64  # so that the masks of a hostile file take little more memory than two copies of the base


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """The shape of a cascade.

    experts: number of clusters, each with an expert mask.
    router: model that assigns images to experts: gmm (a Gaussian mixture with full covariances, by the posterior, as
        in the paper's code), gmm-nearest (by the nearest centre, as in its text) or kmeans.
    components: number of principal components of the dispatcher's features that the router uses.
    scale: scaling of the cascade's features: whiten (unit variance on the training images), none, or eigenvalues
        (division by the variance, as in the paper's text). It can be changed whenever the cascade is used.
    """

    experts: int = 5
    router: RouterName = "gmm"
    components: int = 20
    scale: ScaleName = "whiten"

    def __post_init__(self) -> None:
        for name, least, most in (("experts", 1, MAX_EXPERTS), ("components", 1, None)):
            value = getattr(self, name)
            if type(value) is not int or value < least or (most is not None and value > most):
                span = f"{least} or more" if most is None else f"{least} to {most}"
                raise ConfigError(f"{name} is out of range", expected=span, found=value)
        for name, known in (("router", get_args(RouterName)), ("scale", get_args(ScaleName))):
            if getattr(self, name) not in known:
                raise ConfigError(f"unknown {name}", expected=" or ".join(known), found=getattr(self, name))
