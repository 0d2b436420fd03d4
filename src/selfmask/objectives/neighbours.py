"""Neighbours: tell from a view which image it is of, and which images are its neighbours, among all images.

SwAV with every image as a prototype. A bank keeps one unit vector b_j of each image, slowly updated. A view with the
projected unit vector z predicts p = softmax(z . b_j / temperature) over the bank. The target is the image itself and,
with the weight `share`, its nearest neighbours N(i):

    loss = mean over views of  - (1 - share) log p[i] - share * mean over j in N(i) of log p[j]

Who is a neighbour of whom, a teacher says: the features of the frozen backbone, whitened as the map would, beside what
an earlier stage sees where. Both find neighbours of the same kind more often than raw features do. Now and then the
neighbours are found anew, from the mean of the frozen similarity and that of the run's own features, which get better;
the frozen ones keep a say, so that errors do not feed on themselves. The teacher sees each image a few times in a run,
not in every step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.views import ViewsConfig
from ..errors import ConfigError
from ..evaluation.whitening import chosen_power
from .base import Context, Health, Objective, ObjectiveConfig, register
from .contrast import gathered
from .principal import principal, whitened, whitening
from .swav import run_by_size

_OF_FEW = 10  # of so many images, one at most is a neighbour: classes of few images are small
_FAR = 2.5  # mean of all features, in deviations from it; what most networks put out is nearer than that
_CHUNK = 1024  # images whose similarities to all others are in memory at a time


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class NeighboursConfig(ObjectiveConfig):
    """The settings of neighbours.

    temperature: temperature of the softmax over the bank.
    neighbours: number of nearest neighbours of an image; of few images, a tenth.
    share: share of the target that neighbours get; the rest is the image's own.
    refresh: number of steps after which neighbours are found anew.
    keep: share of its vector that an image keeps in the bank when it is seen again.
    power: how far the teacher's features are whitened, from 0 (not at all) to 1; by default as the map chooses.
    layout: compare images also by what an earlier stage of the backbone sees at 4 x 4 places.
    start: how far the projector whitens features when it starts.
    width: largest length of the vectors in the bank.
    """

    name = "neighbours"
    numbered = True
    # Gentle ones that keep colours: what else an image may look like, its neighbours say.
    views = ViewsConfig(small=0, large_scale=(0.6, 1.0), jitter=(0.2, 0.2, 0.1, 0.02), grey_p=0.0, blur_p=0.0)
    temperature: float = 0.1
    neighbours: int = 20
    share: float = 0.5
    refresh: int = 240
    keep: float = 0.5
    power: float | None = None
    layout: bool = True
    start: float = 0.5
    width: int = 256

    def __post_init__(self) -> None:
        self.check_positive("temperature")
        self.check_whole(neighbours=1, refresh=1, width=2)
        self.check_share("share", "keep", "start", *(() if self.power is None else ("power",)), of="")

    def build(self, context: Context) -> Neighbours:
        frozen, places = context.frozen_layout() if self.layout else (context.frozen_vectors(), None)
        count = min(self.neighbours, max(1, len(frozen) // _OF_FEW))
        config = dataclasses.replace(self, neighbours=count)
        refreshes = max(1, round(context.steps / self.refresh))
        return Neighbours(frozen, config, own=context.vectors, refreshes=refreshes, places=places)


class Neighbours(Objective):
    """The loss with its projector and its bank. A batch is a list of views, with the numbers of their images.

    frozen: the frozen backbone's features of all images, [n, features], in the order of their numbers.
    own: the features of the model as it is now, likewise.
    refreshes: how many parts the run has; neighbours are found anew between them.
    places: what an earlier stage of the frozen backbone sees where, likewise.
    """

    heads = ("projector",)
    bank: Tensor
    near: Tensor
    done: Tensor

    def __init__(
        self,
        frozen: Tensor,
        config: NeighboursConfig,
        *,
        own: Callable[[], Tensor],
        refreshes: int,
        places: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config, self._own, self._refreshes = config, own, refreshes
        if len(frozen) <= config.neighbours:
            raise ConfigError(
                "there are fewer images than neighbours", expected=f"more than {config.neighbours}", found=len(frozen)
            )
        self._power = chosen_power(principal(frozen)[0]) if config.power is None else config.power
        self._teacher = self._whitened(frozen)
        if places is not None:  # either has the same say
            self._teacher = F.normalize(torch.cat([self._teacher, self._whitened(places)], 1), dim=1)
        self.projector = Projector(frozen, config.start, config.width)
        with torch.no_grad():
            self.register_buffer("bank", F.normalize(self.projector(frozen), dim=1))
        self.register_buffer("near", nearest(self._teacher, config.neighbours))
        self.register_buffer("done", torch.tensor(0))
        self._seen: list[tuple[Tensor, Tensor]] = []

    def before_step(self, model: nn.Module, progress: float) -> None:
        due = int(progress * self._refreshes)
        if due > int(self.done):
            own = self._whitened(self._own())
            self.near.copy_(nearest(torch.cat([self._teacher.to(own), own], 1), self.config.neighbours))
            self.done.fill_(due)

    def _whitened(self, features: Tensor) -> Tensor:
        return whitened(features, self._power, self.config.width)

    def loss(self, model: nn.Module, batch: Any, progress: float) -> tuple[Tensor, Health]:
        views, numbers = batch
        features = run_by_size(model, views)
        with torch.autocast(features.device.type, enabled=False):
            vectors = F.normalize(self.projector(features.float()), dim=1)
            logits = vectors @ self.bank.T / self.config.temperature
            own = numbers.repeat(len(views))
            wanted = logits.gather(1, own[:, None])[:, 0]
            kin = logits.gather(1, self.near[own]).mean(1)
            share = self.config.share
            loss = (logits.logsumexp(1) - (1 - share) * wanted - share * kin).mean()
        found = vectors.detach().view(len(views), len(numbers), -1)
        self._seen.append((numbers, F.normalize(found.mean(0), dim=1)))
        spread = 1 - found.mean((0, 1)).square().sum()
        return loss, Health(math.log(len(self.bank)), spread)

    @torch.no_grad()
    def after_step(self, model: nn.Module, progress: float) -> None:
        for numbers, vectors in self._seen:
            numbers, vectors = gathered(numbers), gathered(vectors)  # every process has the same bank
            self.bank[numbers] = F.normalize(self.bank[numbers].lerp(vectors, 1 - self.config.keep), dim=1)
        self._seen.clear()


class Projector(nn.Linear):
    """Starts as centred features, whitened to a power.

    What it puts out moves in a step as the features' length does. Where the mean of all features is much longer than
    what tells them apart, every step would move all images at once, and the loss explodes. So features that lie too far
    out are first moved towards the origin; others stay where they are.
    """

    moved: Tensor

    def __init__(self, features: Tensor, power: float, width: int) -> None:
        super().__init__(features.shape[1], min(width, features.shape[1]))
        centre, matrix = features.mean(0), whitening(features, power, width)
        deviation = (features - centre).square().sum(1).mean().sqrt()
        self.register_buffer("moved", centre * (1 - _FAR * deviation / centre.norm().clamp(min=1e-30)).clamp(min=0))
        with torch.no_grad():
            self.weight.copy_(matrix.T)
            self.bias.copy_(-(centre - self.moved) @ matrix)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features - self.moved)


def nearest(vectors: Tensor, count: int) -> Tensor:
    """The numbers of the `count` vectors most similar to each, itself apart."""
    found = []
    for start in range(0, len(vectors), _CHUNK):
        similar = vectors[start : start + _CHUNK] @ vectors.T
        here = torch.arange(len(similar))
        similar[here, start + here] = -torch.inf
        found.append(similar.topk(count, dim=1).indices)
    return torch.cat(found)
