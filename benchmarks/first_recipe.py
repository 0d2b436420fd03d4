"""What `fast` was before `neighbours`: contrast in 120 steps. docs/recipe.md and docs/gate.md measured it."""

from __future__ import annotations

import dataclasses

from torch import nn

from selfmask import AdaptConfig, MaskConfig, get_masked_model
from selfmask.training.run import weighted_layers

FIRST = AdaptConfig.preset(
    "fast", objective="contrast", steps=120, lr=30.0, quality_every=60, track=(), mask=MaskConfig(norm="anchored")
)


def for_backbone(config: AdaptConfig, model: nn.Module) -> AdaptConfig:
    """With its distance, which was one for all layers together, divided among them."""
    if not config.per_tensor:
        return config
    return dataclasses.replace(
        config, lr=config.lr / weighted_layers(get_masked_model(model, MaskConfig(norm="anchored")))
    )
