"""SwAV's heads where they start from the data, and prototypes that are frozen for a number of steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfmask.objectives import Context
from selfmask.objectives.swav import SwAV, SwAVConfig


def built(config: SwAVConfig, features: Tensor, steps: int = 100) -> SwAV:
    model = nn.Identity()
    context = Context(
        model, features.shape[1], 2, 0, model, list, steps, lambda: features, lambda: features, lambda: (features, None)
    )
    return config.build(context)


def test_prototypes_start_at_centres_of_clusters() -> None:
    torch.manual_seed(0)
    centres = 5 * torch.eye(4, 6)
    features = centres.repeat_interleave(20, 0) + 0.1 * torch.randn(80, 6)
    made = built(SwAVConfig(projection=8, prototypes=4, heads="data", queue_length=0), features)
    with torch.no_grad():
        vectors = F.normalize(made.projector(features), dim=1)
        nearest = (vectors @ made.prototypes.weight.T).argmax(1).view(4, 20)
    assert all(len(row.unique()) == 1 for row in nearest)
    assert len(nearest[:, 0].unique()) == 4
    random = built(SwAVConfig(projection=8, prototypes=4, queue_length=0), features)
    assert not torch.equal(random.prototypes.weight, made.prototypes.weight)


def test_prototypes_are_frozen_for_a_number_of_steps() -> None:
    made = built(SwAVConfig(freeze_steps=30, freeze_prototypes=0.9, queue_length=0), torch.randn(10, 6), steps=100)
    for step, frozen in ((0, True), (29, True), (30, False), (99, False)):
        made.prototypes.weight.grad = torch.ones_like(made.prototypes.weight)
        made.after_backward(nn.Identity(), step / 100)
        assert (made.prototypes.weight.grad is None) == frozen
