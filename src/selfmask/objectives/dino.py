"""DINO: predict from one view of an image what a slower copy of the network makes of another view of it.

The copy, the teacher, is a running mean of the network that learns, the student. Both end in a head with K outputs.
The teacher sees the large views only; its outputs t are centred by their running mean c, which keeps any one output
from winning everywhere, and sharpened by a low temperature, which keeps all outputs from becoming alike. Every other
view v of the same image predicts them from the student's outputs s:

    q_u = softmax((t_u - c) / teacher_temperature),    p_v = softmax(s_v / temperature)
    loss = mean over pairs (u, v), u large, v != u, of  - sum_k q_u[k] log p_v[k]

For a mask, the teacher is a mask too, on the same frozen base: its scores are the running mean of the student's, and
become a mask by the student's rule.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.views import ViewsConfig
from ..errors import ConfigError
from ..masking import MaskedModel
from ..masking.norms import norm_layers
from .base import Context, Health, Number, Objective, ObjectiveConfig, register
from .swav import run_by_size, world


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DINOConfig(ObjectiveConfig):
    """The settings of DINO; the defaults are those of the paper and its code, except for a smaller head.

    hidden: width of the hidden layers of the projection head. The paper used 2,048, for millions of images.
    bottleneck: width of the unit vector before the last layer of the projection head.
    out_dim: number of outputs, K. The paper used 65,536, for millions of images; a centre averaged over batches of 64
        images cannot estimate that many.
    temperature: temperature of the student's softmax.
    teacher_temperature: temperature of the teacher's softmax after its warm-up; lower values give sharper targets.
    teacher_temperature_start: temperature of the teacher's softmax at the start.
    teacher_warmup: share of the run in which the teacher's temperature changes from its start to its final value (30
        epochs of 100).
    teacher_momentum: momentum of the teacher's running mean at the start; it rises to 1 along a cosine. Runs of a few
        hundred steps need less than the paper's value, or the teacher hardly moves.
    centre_momentum: momentum of the running mean that centres the teacher's outputs; 1 disables centring.
    freeze_last_layer: share of the run, at the start, in which the last layer of the head is frozen (1 epoch of 100).
    """

    name = "dino"
    # Where the paper treats one large view more harshly than the other, these are its means over all views.
    views = ViewsConfig(
        small=8,
        large_scale=(0.4, 1.0),
        small_scale=(0.05, 0.4),
        jitter=(0.4, 0.4, 0.2, 0.1),
        blur_p=0.5,
        solarise_p=0.02,
    )
    hidden: int = 512
    bottleneck: int = 256
    out_dim: int = 4096
    temperature: float = 0.1
    teacher_temperature: float = 0.07
    teacher_temperature_start: float = 0.04
    teacher_warmup: float = 0.3
    teacher_momentum: float = 0.996
    centre_momentum: float = 0.9
    freeze_last_layer: float = 0.01

    def __post_init__(self) -> None:
        self.check_whole(hidden=1, bottleneck=1, out_dim=2)
        self.check_positive("temperature", "teacher_temperature", "teacher_temperature_start")
        self.check_share("teacher_momentum", "centre_momentum", of="")
        self.check_share("teacher_warmup", "freeze_last_layer")

    def build(self, context: Context) -> DINO:
        mean = torch.cat([context.frozen(batch) for batch in context.reference()]).mean(0)
        return DINO(context.model, mean, self, large_crops=context.large_crops, seed=context.seed)

    def teacher_temperature_at(self, progress: float) -> float:
        """Rises, or falls, by a line."""
        warm = min(1.0, progress / self.teacher_warmup) if self.teacher_warmup else 1.0
        return self.teacher_temperature_start + warm * (self.teacher_temperature - self.teacher_temperature_start)

    def teacher_momentum_at(self, progress: float) -> float:
        """Rises to 1 by half a cosine."""
        return 1 - (1 - self.teacher_momentum) * (1 + math.cos(math.pi * progress)) / 2


class DINO(Objective):
    """The DINO loss with its heads, teacher and centre. A batch is a list of views, the large ones first.

    model: what learns, as it is when training begins: the teacher begins as a copy of it.
    mean: of the features of the frozen backbone. The head begins with features less their mean: what they have in
        common says nothing, and would make all images alike to a head that is still random.

    With several processes each holds a part of the batch, of equal size; the centre is that of the whole batch. So it
    is with gradients that are accumulated: the centre moves once a step, whatever the number of parts.
    """

    heads = ("head", "teacher_head", "centre")
    centre: Tensor
    _sum: Tensor

    def __init__(
        self, model: nn.Module, mean: Tensor, config: DINOConfig, *, large_crops: int = 2, seed: int = 0
    ) -> None:
        super().__init__()
        self.config, self.large_crops = config, large_crops
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = ProjectionHead(mean.detach().float().cpu(), config)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)
        self.teacher = Teacher(model)
        self.register_buffer("centre", torch.zeros(config.out_dim))
        # Of the teacher's outputs in this step. It begins anew with every step, so it is no state.
        self.register_buffer("_sum", torch.zeros(config.out_dim), persistent=False)
        self._rows = 0

    def before_step(self, model: nn.Module, progress: float) -> None:
        """Forget the outputs of the step before."""
        self._sum.zero_()
        self._rows = 0

    def after_backward(self, model: nn.Module, progress: float) -> None:
        """Keep the last layer where it is while what it gets is still settling."""
        if progress < self.config.freeze_last_layer:
            self.head.last.weight.grad = None

    @torch.no_grad()
    def after_step(self, model: nn.Module, progress: float) -> None:
        """Let teacher and centre follow."""
        momentum = self.config.teacher_momentum_at(progress)
        self.teacher.follow(model, momentum)
        follow(self.teacher_head, self.head, momentum)
        if self._rows:
            if world() > 1:
                dist.all_reduce(self._sum)
            self.centre.lerp_(self._sum / (self._rows * world()), 1 - self.config.centre_momentum)

    def loss(self, model: nn.Module, batch: Any, progress: float) -> tuple[Tensor, Health]:
        """The loss and its metrics. In train mode the teacher's outputs count for the next centre."""
        views = self._checked(batch)
        config, count, large = self.config, len(views), self.large_crops
        features, of_teacher = run_by_size(model, views), self.teacher(views[:large], progress)
        # Heads are cheap, and differences of a few hundredths, which a temperature blows up, are too fine for 16 bits.
        with torch.autocast(features.device.type, enabled=False):
            targets = self._targets(of_teacher.float(), progress).view(large, -1, config.out_dim)
            points = self.head.points(features.float())
            outputs = self.head.outputs(points).view(count, -1, config.out_dim)  # [views, images, K]
            log_predictions = F.log_softmax(outputs / config.temperature, dim=2)
            pairs = [
                -(targets[u] * log_predictions[v]).sum(1).mean() for u in range(large) for v in range(count) if u != v
            ]
            loss = torch.stack(pairs).mean()
        entropy = -torch.xlogy(targets, targets).sum(2).mean()
        more: dict[str, Number] = {
            "teacher_entropy": entropy,
            "kl": loss.detach() - entropy,  # every large view is in equally many pairs
            "teacher_momentum": config.teacher_momentum_at(progress),
        }
        return loss, Health(math.log(config.out_dim), 1 - points.detach().mean(0).square().sum(), more)

    @torch.no_grad()
    def _targets(self, features: Tensor, progress: float) -> Tensor:
        """What the teacher's head makes of its features, centred and sharpened."""
        outputs = self.teacher_head.outputs(self.teacher_head.points(features))
        if self.training:
            self._sum += outputs.sum(0)
            self._rows += len(outputs)
        return F.softmax((outputs - self.centre) / self.config.teacher_temperature_at(progress), dim=1)

    def _checked(self, batch: Any) -> Sequence[Tensor]:
        if len(batch) < max(2, self.large_crops) or len({len(view) for view in batch}) != 1:
            raise ConfigError(
                "DINO needs several views of the same images",
                expected=f"at least {max(2, self.large_crops)} views, each of the same number of images",
                found=[list(view.shape) for view in batch],
                todo="use more crops: --large, --small",
            )
        views: Sequence[Tensor] = batch
        return views


class ProjectionHead(nn.Module):
    """Features -> points on a unit sphere -> K outputs: the cosines to K directions.

    The last layer is weight-normalised with lengths of 1, as in the paper's code where training is to be stable.
    """

    def __init__(self, mean: Tensor, config: DINOConfig) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(len(mean), config.hidden),
            nn.GELU(),
            nn.Linear(config.hidden, config.hidden),
            nn.GELU(),
            nn.Linear(config.hidden, config.bottleneck),
        )
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        first: Any = self.mlp[0]
        with torch.no_grad():
            first.bias.copy_(-first.weight @ mean)
        self.last = nn.Linear(config.bottleneck, config.out_dim, bias=False)

    def points(self, features: Tensor) -> Tensor:
        return F.normalize(self.mlp(features), dim=1)

    def outputs(self, points: Tensor) -> Tensor:
        return F.linear(points, F.normalize(self.last.weight, dim=1))


class Teacher(nn.Module):
    """A copy of a model whose parameters are running means of the model's.

    It has modules of its own, so that modes of the two never mix, but shares the tensors that do not learn: a frozen
    base is there once, and in no checkpoint. Of a masked model, the state is all but the base: scores, and norm
    statistics, which the teacher moves by itself. Of a plain network, it is everything.

    In train mode it normalises by the batch, as the student does under the same norm policy: with running statistics
    its features would be others than those the student is to learn to give. But it drops nothing out: noise on the
    student makes the task harder, noise on the targets makes it wrong.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        fixed: list[Tensor] = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        if isinstance(model, MaskedModel):
            fixed += model.base.buffers()
        twin = copy.deepcopy(model, {id(tensor): tensor for tensor in fixed}).requires_grad_(False)
        self._twin = (twin,)  # in a tuple, a module is not a submodule
        if isinstance(twin, MaskedModel):
            for name, part in twin.named_children():
                if part is not twin.base:
                    self.add_module(name, part)
        else:
            self.model = twin
        self.train()

    def train(self, mode: bool = True) -> Teacher:
        super().train(mode)
        (twin,) = self._twin
        twin.train(mode)
        norms = set(norm_layers(twin).values())
        for module in twin.modules():
            if module not in norms and not isinstance(module, MaskedModel):
                module.training = False
        return self

    @torch.no_grad()
    def forward(self, views: Sequence[Tensor], progress: float) -> Tensor:
        (twin,) = self._twin
        if isinstance(twin, MaskedModel):
            twin.progress = progress
        return run_by_size(twin, views)

    def follow(self, model: nn.Module, momentum: float) -> None:
        (twin,) = self._twin
        follow(twin, model, momentum)


@torch.no_grad()
def follow(mean: nn.Module, module: nn.Module, momentum: float) -> None:
    """Move the parameters of `mean` towards those of a module that is built alike."""
    for own, new in zip(mean.parameters(), module.parameters(), strict=True):
        if own is not new:
            own.lerp_(new, 1 - momentum)
