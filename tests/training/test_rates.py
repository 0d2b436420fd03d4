"""Rates of scores do not depend on how a layer is cut into tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfmask import AdaptConfig, MaskConfig, MaskedModel, get_masked_model
from selfmask.training.optimizer import PerTensorSGD
from selfmask.training.run import score_group, score_rate, weighted_layers
from selfmask.training.schedule import cosine

WIDTH, TOKENS = 24, 10


class Attention(nn.Module):
    """With its queries, keys and values in one tensor, or in three."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole, self.fused = nn.Linear(WIDTH, 3 * WIDTH), fused
        if fused:
            self.qkv = whole
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            for part, weight, bias in zip(
                (self.q, self.k, self.v), whole.weight.chunk(3), whole.bias.chunk(3), strict=True
            ):
                part.load_state_dict({"weight": weight, "bias": bias})
        torch.manual_seed(1)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        output: Tensor = self.proj(F.scaled_dot_product_attention(3 * q, 3 * k, v)).mean(1)
        return output


def trained(fused: bool, detach_alpha: bool, steps: int, together: bool = True) -> tuple[MaskedModel, Tensor, Tensor]:
    """A masked attention after some steps: its model, and the mask and scores of queries, keys and values as one."""
    masked = get_masked_model(Attention(fused), MaskConfig(detach_alpha=detach_alpha))
    group = score_group(masked, AdaptConfig.preset("fast"), 1.5, 6)
    settings = {"params": group.parameters, "lr": group.lr, "per_tensor": True}
    sgd = PerTensorSGD([settings], momentum=0.9, together=group.together if together else ())
    x = torch.randn(64, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    wanted = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
    for _ in range(steps):
        sgd.zero_grad()
        F.mse_loss(masked(x), wanted).backward()
        sgd.step()
    scores = dict(zip(masked.sparsity(), masked.scores.values(), strict=False))
    names = ["qkv.weight"] if fused else ["q.weight", "k.weight", "v.weight"]
    whole = torch.cat([scores[name].detach() for name in names])
    return masked, whole > 0, whole


def test_a_fused_and_a_split_attention_take_the_same_step() -> None:
    one, three = (trained(fused, True, 1) for fused in (True, False))
    torch.testing.assert_close(three[2], one[2], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("detach_alpha", "most"), [(True, 0.02), (False, 0.1)])
def test_a_fused_and_a_split_attention_flip_the_same_weights(detach_alpha: bool, most: float) -> None:
    """Few more differ where gradients go through 1 / alpha, which every tensor has of its own."""
    one, three = (trained(fused, detach_alpha, 6)[1] for fused in (True, False))
    off, differ = (float(each.double().mean()) for each in (~one, one != three))
    assert 0.05 < off < 0.2
    assert differ < most * off
    apart = trained(False, detach_alpha, 6, together=False)[1]  # each in units of its own: what the rule is there for
    assert float((one != apart).double().mean()) > 3 * differ


def test_a_constant_gradient_travels_the_distance() -> None:
    """Whatever its size, the momentum and the number of steps."""
    config = AdaptConfig.preset("fast")
    for size in (1e-6, 1.0, 1e3):
        score, steps = nn.Parameter(torch.ones(50)), 400
        rate = score_rate(7.0, config.momentum, steps)
        sgd = PerTensorSGD([{"params": [score], "lr": rate, "per_tensor": True}], momentum=config.momentum)
        for step in range(steps):
            sgd.param_groups[0]["lr"] = rate * cosine((step + 0.5) / steps, 0.0)
            score.grad = torch.full((50,), size)
            sgd.step()
        torch.testing.assert_close(score.detach(), torch.full((50,), 1 - 7.0), rtol=0.06, atol=0)


def test_a_layer_counts_once() -> None:
    assert [weighted_layers(trained(fused, True, 0)[0]) for fused in (True, False)] == [2, 2]


def test_scores_travel_farther_in_longer_runs_and_less_far_in_transformers() -> None:
    config = AdaptConfig.preset("fast")
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4))
    transformer = nn.Sequential(nn.Conv2d(3, 8, 3), nn.TransformerEncoderLayer(8, 1, 32))
    assert [config.rate(steps, convolutions) / config.lr for steps in (1, 240, 960, 3840)] == [1, 1, 2, 4]
    assert [config.rate(steps, transformer) / config.lr for steps in (1, 240, 960, 3840)] == [0.25, 0.25, 0.5, 1]
    assert dataclasses.replace(config, per_tensor=False).rate(1920, transformer) == config.lr
