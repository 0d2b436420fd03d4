"""Contrast: tell from one view of an image which other view is of the same image, and which images are like it.

SwAV with the images of the batch themselves as prototypes: nothing has to be learned before the loss says something,
which is what a run of minutes needs. Each view t predicts where another view s of the same image is,
p_t = softmax(z_t . z_s / temperature) over all images of the batch. The target is the image itself and, with the
weight `kinship`, the images that are like it to the frozen backbone, q = softmax(h . h / kin_temperature), so that
what the backbone knew of the images is not forgotten (as in "Similarity Contrastive Estimation", WACV 2023):

    loss = mean over pairs (s, t), s large, t != s, of  - sum_j ((1 - kinship) [j is itself] + kinship q_j) log p_t[j]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.nn.functional as dist_functions
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.views import ViewsConfig
from ..errors import ConfigError
from .base import Context, Health, Objective, ObjectiveConfig, is_number, register
from .swav import rank, run_by_size, world


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastConfig(ObjectiveConfig):
    """The settings of contrast.

    temperature: temperature of the softmax of the prediction.
    kinship: share of the target that is distributed over similar images rather than given to the image itself.
    kin_temperature: temperature of the similarities behind `kinship`; lower values select fewer, closer images.
    """

    name = "contrast"
    views = ViewsConfig(small=0, large_scale=(0.6, 1.0), jitter=(0.4, 0.4, 0.4, 0.1), blur_p=0.0)  # gentle ones
    temperature: float = 0.2
    kinship: float = 0.5
    kin_temperature: float = 0.1

    def __post_init__(self) -> None:
        self.check_positive("temperature", "kin_temperature")
        if not is_number(self.kinship) or not 0 <= self.kinship < 1:
            raise ConfigError("kinship is out of range", expected="a share from 0 to below 1", found=self.kinship)

    def build(self, context: Context) -> Contrast:
        centre = torch.cat([context.frozen(batch) for batch in context.reference()]).mean(0)
        return Contrast(centre, self, frozen=context.frozen, large_crops=context.large_crops)


class Contrast(Objective):
    """The contrastive loss with its projector. A batch is a list of views, the large ones first.

    centre: the mean of the frozen backbone's features. The projector starts as the features less their mean: what they
        have in common says nothing, and hides what tells images apart.
    frozen: the features of the frozen backbone, to tell which images are alike.

    With several processes each holds a part of the batch; views are looked for among the images of all of them.
    """

    heads = ("projector",)
    centre: Tensor

    def __init__(
        self,
        centre: Tensor,
        config: ContrastConfig,
        *,
        frozen: Callable[[Tensor], Tensor],
        large_crops: int = 2,
    ) -> None:
        super().__init__()
        self.config, self.large_crops, self._frozen = config, large_crops, frozen
        self.register_buffer("centre", centre.clone())
        self.projector = nn.Linear(len(centre), len(centre))
        with torch.no_grad():
            nn.init.eye_(self.projector.weight)
            self.projector.bias.copy_(-centre)

    def loss(self, model: nn.Module, batch: Any, progress: float) -> tuple[Tensor, Health]:
        if len(batch) < max(2, self.large_crops) or len({len(view) for view in batch}) != 1:
            found = [list(view.shape) for view in batch]
            raise ConfigError("contrast needs several views of the same images", found=found, todo="use 2 large views")
        if len(batch[0]) * world() < 2:
            raise ConfigError("contrast needs several images in a batch", expected="2 or more", found=len(batch[0]))
        features = run_by_size(model, batch)
        with torch.autocast(features.device.type, enabled=False):
            vectors = F.normalize(self.projector(features.float()), dim=1).view(len(batch), len(batch[0]), -1)
            targets = self._targets(batch[0])
            everywhere = [gathered(vectors[s]) for s in range(self.large_crops)]
            pairs = [
                -(targets * F.log_softmax(vectors[t] @ everywhere[s].T / self.config.temperature, 1)).sum(1).mean()
                for s in range(self.large_crops)
                for t in range(len(batch))
                if s != t
            ]
            loss = torch.stack(pairs).mean()
        spread = 1 - vectors.detach().mean((0, 1)).square().sum()
        return loss, Health(math.log(targets.shape[1]), spread)

    @torch.no_grad()
    def _targets(self, view: Tensor) -> Tensor:
        """What each image here is to be found as, among all: itself, and what is like it to the frozen backbone."""
        images = len(view)
        own = torch.eye(images * world(), device=view.device)[images * rank() : images * (rank() + 1)]
        if self.config.kinship == 0:
            return own
        h = F.normalize(self._frozen(view).float() - self.centre, dim=1)
        alike = (h @ gathered(h).T / self.config.kin_temperature).masked_fill_(own.bool(), -torch.inf).softmax(1)
        return (1 - self.config.kinship) * own + self.config.kinship * alike


def gathered(vectors: Tensor) -> Tensor:
    """The vectors of all processes, in the order of ranks; gradients find their way back."""
    if world() == 1:
        return vectors
    return torch.cat(dist_functions.all_gather(vectors.contiguous()))  # type: ignore[no-untyped-call]
