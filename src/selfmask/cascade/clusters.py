"""The second stage: what the dispatcher makes of the images, the router, and who belongs to which cluster."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ClusterError, MaskFileError, RunDamagedError, RunWriteError
from ..files import write_atomically
from ..maskfile import open_container
from ..maskfile.container import container_bytes
from .config import ShapeConfig
from .router import Router

_SHOWN = 20  # clusters named in a message


@dataclasses.dataclass(frozen=True)
class Clusters:
    """The router, and for each image that could be read: its number, its expert, and how far from the centre it is."""

    router: Router
    numbers: Tensor
    experts: Tensor
    distances: Tensor

    @staticmethod
    def fit(features: Tensor, numbers: list[int], config: ShapeConfig, seed: int = 0) -> Clusters:
        """By the dispatcher's features of the images with these numbers."""
        router = Router.fit(features, config, seed)
        experts = router(features)
        distances = router.distances(features).gather(1, experts[:, None])[:, 0]
        return Clusters(router, torch.tensor(numbers), experts, distances)

    @property
    def sizes(self) -> list[int]:
        counts: list[int] = self.experts.bincount(minlength=self.router.experts).tolist()
        return counts

    def members(self, expert: int) -> list[int]:
        """The numbers of an expert's images."""
        found: list[int] = self.numbers[self.experts == expert].tolist()
        return found

    def check(self, least: int) -> None:
        """Refuse clusters of fewer images than an expert needs, before any expert is trained."""
        if min(self.sizes) >= least:
            return
        small = [f"{size} in cluster {number}" for number, size in enumerate(self.sizes) if size < least][:_SHOWN]
        enough = sum(size >= least for size in self.sizes)
        raise ClusterError(
            "a cluster is empty" if 0 in self.sizes else "a cluster has fewer images than a training step needs",
            expected=f"at least {least} images in each of {len(self.sizes)} clusters, including held-out images",
            found=", ".join(small),
            todo="use fewer experts, or k-means, whose clusters are more even (the dispatcher is kept): "
            f"--experts {max(1, enough)}, --router kmeans"
            if len(self.sizes) > 1
            else "add images, or choose another folder and a smaller batch: --out, --batch-size",
        )

    # ---- storage ----------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        tensors = {f"router.{name}": value for name, value in self.router.tensors().items()}
        tensors |= {"numbers": self.numbers, "experts": self.experts, "distances": self.distances}
        write_atomically(path, container_bytes(tensors, {}, hashed=""), RunWriteError)

    @staticmethod
    def load(path: Path, config: ShapeConfig) -> Clusters:
        try:
            with open_container(path) as file:
                tensors = file.read(hashed="")
            own = {key.removeprefix("router."): value for key, value in tensors.items() if key.startswith("router.")}
            router = Router.of(own, len(own["mean"]), config.experts)
            return Clusters(router, tensors["numbers"], tensors["experts"], tensors["distances"])
        except (MaskFileError, KeyError, ValueError) as error:
            raise RunDamagedError(
                f"{path} cannot be read",
                found=error.what if isinstance(error, MaskFileError) else error,
                todo="remove it and the experts next to it, then run the same command again (the dispatcher is kept)",
            ) from error
