"""SwAV: predict from one view of an image the cluster that another view of it is assigned to.

Each view's features are projected onto a unit sphere that holds K prototypes c_k. The large views are assigned
to prototypes by optimal transport, so that every prototype gets an equal share of the images (q, by Sinkhorn); every
other view t of the same image predicts that assignment, p_t = softmax(z_t . c / temperature):

    loss = mean over pairs (s, t), s large, t != s, of  - sum_k q_s[k] log p_t[k]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from .base import Context, Health, Number, Objective, ObjectiveConfig, register
from .principal import whitening

_POWER, _ROUNDS = 0.5, 10  # of whitening, and of k-means, where heads start from data


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SwAVConfig(ObjectiveConfig):
    """The settings of SwAV; the defaults are those of the paper and its code.

    projection: dimension of the projected features.
    prototypes: number of prototypes, K.
    temperature: temperature of the softmax of the prediction.
    epsilon: regularisation of Sinkhorn; smaller values give sharper assignments.
    iterations: number of Sinkhorn iterations.
    queue_length: number of earlier projections that take part in an assignment, 0 for none. Small batches need them:
        fewer than K images cannot be divided equally among K prototypes. Best a multiple of the batch size over all
        processes.
    queue_start: share of the run after which the queue starts to fill (epoch 30 of 150); it is used once it is full.
    freeze_prototypes: share of the run, at the start, in which the prototypes are frozen. The paper's code froze them
        for 5,005 of 117,188 steps (150 epochs of 50,000 images in batches of 64), hence 0.0427.
    freeze_steps: number of steps in which they are, instead of that share.
    heads: how the heads start: random as in the paper, or data (the projector half whitens the frozen features, and the
        prototypes are the centres of clusters of what it makes of them). A short run learns little from random ones.
    """

    name = "swav"
    projection: int = 128
    prototypes: int = 500
    temperature: float = 0.1
    epsilon: float = 0.05
    iterations: int = 3
    queue_length: int = 3840
    queue_start: float = 0.2
    freeze_prototypes: float = 0.0427
    freeze_steps: int | None = None
    heads: Literal["random", "data"] = "random"

    def __post_init__(self) -> None:
        self.check_whole(projection=1, prototypes=2, iterations=1, queue_length=0)
        self.check_positive("temperature", "epsilon")
        self.check_share("queue_start", "freeze_prototypes")
        if self.freeze_steps is not None:
            self.check_whole(freeze_steps=0)
        if self.heads not in ("random", "data"):
            raise ConfigError("heads is not known", expected="random or data", found=self.heads)

    def build(self, context: Context) -> SwAV:
        frozen = self.freeze_prototypes if self.freeze_steps is None else min(1.0, self.freeze_steps / context.steps)
        own = dataclasses.replace(self, freeze_prototypes=frozen)
        made = SwAV(context.features, own, large_crops=context.large_crops, seed=context.seed)
        if self.heads == "data":
            made.start_from(context.frozen_vectors())
        return made


class SwAV(Objective):
    """The SwAV loss with its projector, prototypes and queue. A batch is a list of views, the large ones first.

    With several processes each holds a part of the batch, of equal size. Assignments and queue are then those of
    the whole batch, so that the loss, averaged over processes, is that of one process with all images.
    """

    heads = ("projector", "prototypes")
    queue: Tensor
    queue_filled: Tensor

    def __init__(self, features: int, config: SwAVConfig, *, large_crops: int = 2, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.large_crops = large_crops
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.projector = nn.Linear(features, config.projection)
            self.prototypes = nn.Linear(config.projection, config.prototypes, bias=False)
        # Past projections of each large view, newest first: training state, so they are saved with the heads.
        self.register_buffer("queue", torch.zeros(large_crops, config.queue_length, config.projection))
        self.register_buffer("queue_filled", torch.zeros((), dtype=torch.long))
        self._normalise()

    @torch.no_grad()
    def start_from(self, features: Tensor) -> None:
        """Begin with heads that suit these features, instead of random ones."""
        matrix = whitening(features, _POWER, self.config.projection)
        weight, bias = self.projector.weight, self.projector.bias
        weight.zero_()
        weight[: matrix.shape[1]] = matrix.T
        bias.copy_(-features.mean(0) @ weight.T)
        vectors = F.normalize(self.projector(features), dim=1)
        chosen = torch.linspace(0, len(vectors) - 1, self.config.prototypes).long()  # images more than once, if few
        centres = vectors[chosen]
        for _ in range(_ROUNDS):  # spherical k-means
            nearest = (vectors @ centres.T).argmax(1)
            sums = torch.zeros_like(centres).index_add_(0, nearest, vectors)
            centres = torch.where(sums.norm(dim=1, keepdim=True) > 0, F.normalize(sums, dim=1), centres)
        self.prototypes.weight.copy_(centres)

    def before_step(self, model: nn.Module, progress: float) -> None:
        """Put the prototypes back on the sphere."""
        self._normalise()

    @torch.no_grad()
    def _normalise(self) -> None:
        self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))

    def after_backward(self, model: nn.Module, progress: float) -> None:
        """Keep the prototypes where they are while features are still settling."""
        if progress < self.config.freeze_prototypes:
            self.prototypes.weight.grad = None

    def loss(self, model: nn.Module, batch: Any, progress: float) -> tuple[Tensor, Health]:
        """The loss and its metrics. In train mode the batch enters the queue, from `queue_start` on."""
        views = self._checked(batch)
        count, large = len(views), self.large_crops
        use_queue = 0 < self.config.queue_length <= int(self.queue_filled)
        features = run_by_size(model, views)
        # Heads and Sinkhorn are cheap, and exp(score / epsilon) is not to be trusted to 16 bits.
        with torch.autocast(features.device.type, enabled=False):
            projections = F.normalize(self.projector(features.float()), dim=1)
            scores = self.prototypes(projections).view(count, -1, self.config.prototypes)  # [views, images, K]
            assignments = self._assign(scores.detach()[:large], use_queue)
            log_predictions = F.log_softmax(scores / self.config.temperature, dim=2)
            pairs = [
                -(assignments[s] * log_predictions[t]).sum(1).mean()
                for s in range(large)
                for t in range(count)
                if s != t
            ]
            loss = torch.stack(pairs).mean()
        if self.training and self.config.queue_length and progress >= self.config.queue_start:
            self._remember(projections.detach().view(count, -1, self.config.projection)[:large])
        return loss, Health(math.log(self.config.prototypes), more=self._metrics(assignments, use_queue))

    @torch.no_grad()
    def _assign(self, scores: Tensor, use_queue: bool) -> Tensor:
        """Soft assignments [large views, images, K]; the queue, if used, takes part in the sharing out."""
        assignments = []
        for view, own in enumerate(scores):
            past = own.new_empty(0, own.shape[1])
            if use_queue:  # each process scores a part of the queue, which is the same in all of them
                past = self.prototypes(self.queue[view].tensor_split(world())[rank()])
            scores_of_all = torch.cat([own, past])
            assignments.append(sinkhorn(scores_of_all, self.config.epsilon, self.config.iterations, len(own)))
        return torch.stack(assignments)

    @torch.no_grad()
    def _remember(self, projections: Tensor) -> None:
        """Put the projections of all processes' images, in the order of ranks, in front of the queue."""
        if world() > 1:
            parts = [torch.empty_like(projections) for _ in range(world())]
            dist.all_gather(parts, projections.contiguous())
            projections = torch.cat(parts, dim=1)
        length = self.config.queue_length
        self.queue.copy_(torch.cat([projections, self.queue], dim=1)[:, :length])
        self.queue_filled.add_(projections.shape[1]).clamp_(max=length)

    def _metrics(self, assignments: Tensor, use_queue: bool) -> dict[str, Number]:
        """A healthy run uses most prototypes, and assigns with less entropy than ln K."""
        k = self.config.prototypes
        best = assignments.argmax(2).flatten()
        return {
            "assignment_entropy": -torch.xlogy(assignments, assignments).sum(2).mean(),
            "prototypes_used": torch.bincount(best, minlength=k).count_nonzero() / min(k, best.numel()),
            "queue_used": float(use_queue),
        }

    def _checked(self, batch: Any) -> Sequence[Tensor]:
        if len(batch) < max(2, self.large_crops) or len({len(view) for view in batch}) != 1:
            raise ConfigError(
                "SwAV needs several views of the same images",
                expected=f"at least {max(2, self.large_crops)} views, each of the same number of images",
                found=[list(view.shape) for view in batch],
                todo="use more crops: --large, --small",
            )
        views: Sequence[Tensor] = batch
        return views


def run_by_size(model: nn.Module, views: Sequence[Tensor]) -> Tensor:
    """Features of all views, one after the other; views of equal size share one pass through the model."""
    groups = [list(group) for _, group in groupby(views, key=lambda view: view.shape[1:])]
    return torch.cat([model(torch.cat(group)) for group in groups])


@torch.no_grad()
def sinkhorn(scores: Tensor, epsilon: float, iterations: int, first: int | None = None) -> Tensor:
    """Assignments Q [images, K] from scores [images, K], in float32, over the images of all processes.

    With `first`, all images take part, but only the assignments of the first so many are returned.

    Q = exp(scores / epsilon); in turn, every prototype's sum over images is scaled to 1/K and every image's sum over
    prototypes to 1/B; in the end Q is multiplied by B, so that an image's assignment sums to 1. Scaling only ever
    multiplies rows and columns, so it is kept as one factor for each: Q itself is formed once, at the end.
    """
    scores = scores.float() / epsilon
    largest = scores.max()
    images = torch.tensor(float(len(scores)), device=scores.device)
    _all_reduce(largest, "MAX")
    _all_reduce(images)
    kernel = scores.sub_(largest).exp_()  # a common factor changes nothing, and this one keeps exp from overflowing
    of_image = torch.ones_like(kernel[:, 0])
    for _ in range(iterations):
        mass = kernel.T @ of_image
        _all_reduce(mass)
        of_prototype = 1 / (kernel.shape[1] * _nonzero(mass))
        of_image = 1 / (images * _nonzero(kernel @ of_prototype))
    return kernel[:first] * of_prototype * (of_image * images)[:first, None]


def _nonzero(sums: Tensor) -> Tensor:
    return sums.clamp(min=torch.finfo(sums.dtype).tiny)


def world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world() > 1 else 0


def _all_reduce(value: Tensor, operation: str = "SUM") -> None:
    if world() > 1:
        dist.all_reduce(value, getattr(dist.ReduceOp, operation))
