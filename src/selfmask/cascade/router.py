"""The router R: which expert an image goes to, by the dispatcher's features of it."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import Tensor

from ..errors import ClusterError, CorruptCascadeError
from ..evaluation.moments import Moments
from .config import ShapeConfig


@dataclasses.dataclass(frozen=True)
class Router:
    """Features h are made of length 1 and projected to z = (h - mean) @ components: whitened principal components.

    The score of expert k is  weights[k] + log det precisions[k] - |(z - centres[k]) @ precisions[k]|^2 / 2,  the log of
    its posterior up to a constant; the highest wins. (Where the nearest centre is to win, as in
    k-means, all precisions are 1.)
    """

    mean: Tensor
    """[width]"""
    components: Tensor
    """[width, components]"""
    centres: Tensor
    """[experts, components]"""
    precisions: Tensor
    """Cholesky factors of the inverse covariances: [experts, components, components]"""
    weights: Tensor
    """Logarithms of the shares of the experts: [experts]"""

    @staticmethod
    def fit(features: Tensor, config: ShapeConfig, seed: int = 0) -> Router:
        """For the dispatcher's features of the training images, [images, width]."""
        images, width = features.shape
        if images <= config.components or width < config.components:
            raise ClusterError(
                f"the router cannot use {config.components} components",
                expected=f"more than {config.components} images, and at least that many features",
                found=f"{images} images with {width} features each",
                todo=f"add images, or use fewer components: --components {max(1, min(images - 1, width) // 2)}",
            )
        if not bool(features.isfinite().all()):
            raise ClusterError(
                "the dispatcher's features are not finite", todo="adapt it again, in float32: --precision float32"
            )
        if images < config.experts:
            raise ClusterError(
                "there are fewer images than experts",
                expected=config.experts,
                found=images,
                todo="use one expert: --experts 1",
            )
        moments = Moments(width)
        for part in torch.split(features, 4096):
            moments.add(F.normalize(part, dim=1))
        found = moments.principal(config.components)
        if not bool((found.variances > 0).all()):
            usable = int((found.variances > 0).sum())
            raise ClusterError(
                "the dispatcher's features vary in too few directions",
                expected=f"{config.components}, one for each component",
                found=usable,
                todo=f"use fewer components: --components {max(1, usable)}"
                if usable
                else "check that the images differ",
            )
        # Rounded and laid out as they are stored, and before anything depends on them.
        mean, components = (
            part.half().float().contiguous() for part in (moments.mean, found.vectors / found.variances.sqrt())
        )
        z = ((F.normalize(features, dim=1) - mean) @ components).double().numpy()
        try:
            return Router(mean, components, *_clusters(z, config, seed))
        except ValueError as error:
            raise ClusterError(
                f"the images could not be divided into {config.experts} clusters",
                found=str(error).splitlines()[0],
                todo="use k-means, or fewer experts: --router kmeans, --experts",
            ) from error

    @property
    def experts(self) -> int:
        return len(self.centres)

    def distances(self, features: Tensor) -> Tensor:
        """|(z - centre) @ precision| of every image and expert: how unlike those of its cluster an image is."""
        z = (F.normalize(features.float(), dim=1) - self.mean) @ self.components
        return torch.stack(
            [
                ((z - centre) @ precision).norm(dim=1)
                for centre, precision in zip(self.centres, self.precisions, strict=True)
            ],
            1,
        )

    def scores(self, features: Tensor) -> Tensor:
        """The log of each expert's posterior, up to a constant: [images, experts]."""
        volumes = self.precisions.diagonal(dim1=1, dim2=2).log().sum(1)
        return self.weights + volumes - self.distances(features).square() / 2

    def __call__(self, features: Tensor) -> Tensor:
        """The number of each image's expert."""
        return self.scores(features).argmax(1)

    def to(self, device: torch.device) -> Router:
        return Router(*(getattr(self, field.name).to(device) for field in dataclasses.fields(self)))

    # ---- storage ----------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """As they are stored; nothing is lost, since mean and components are of 16 bits already."""
        stored = {field.name: getattr(self, field.name).cpu() for field in dataclasses.fields(self)}
        return stored | {name: stored[name].half() for name in ("mean", "components")}

    @staticmethod
    def of(tensors: Mapping[str, Tensor], width: int, experts: int) -> Router:
        """From what was stored, which need not be sound."""
        components = tensors["components"].shape[1] if tensors.get("components", torch.empty(0)).ndim == 2 else 0
        shapes = {
            "mean": (width,),
            "components": (width, components),
            "centres": (experts, components),
            "precisions": (experts, components, components),
            "weights": (experts,),
        }
        check_tensors("router", tensors, shapes)
        return Router(**{name: tensors[name].float() for name in shapes})


def _clusters(z: NDArray[np.float64], config: ShapeConfig, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Centres, precisions and logarithms of weights."""
    seed = seed % 2**32
    if config.router == "kmeans":
        return _nearest(KMeans(config.experts, n_init=10, random_state=seed).fit(z).cluster_centers_)
    mixture = GaussianMixture(config.experts, covariance_type="full", random_state=seed, max_iter=300)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # any mixture routes; a better one routes better
        mixture.fit(z)
    if config.router == "gmm-nearest":
        return _nearest(mixture.means_)
    precisions, weights = (torch.from_numpy(part) for part in (mixture.precisions_cholesky_, mixture.weights_))
    return torch.from_numpy(mixture.means_).float(), precisions.float(), weights.log().float()


def _nearest(centres: NDArray[np.float64]) -> tuple[Tensor, Tensor, Tensor]:
    """A mixture in which the nearest centre wins."""
    experts, components = centres.shape
    precisions = torch.eye(components).expand(experts, -1, -1).contiguous()
    return torch.from_numpy(centres).float(), precisions, torch.zeros(experts)


def check_tensors(what: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors that are not these, or hold what is no number."""
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if found != dict(shapes):
        raise CorruptCascadeError(f"the {what} has the wrong tensors", expected=dict(shapes), found=str(found)[:300])
    if any(math.prod(shape) == 0 for shape in shapes.values()):
        raise CorruptCascadeError(f"the {what} is empty", expected="at least one component", found=str(found)[:300])
    for name, value in tensors.items():
        if not bool(value.float().isfinite().all()):
            raise CorruptCascadeError(f"the {what} contains values that are not finite", found=name)
