"""A copy of a backbone that learns beside the frozen one: what a masked model is to a mask, for every other method."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..masking import MaskConfig, MaskedModel
from ..masking.norms import Anchor, can_be_anchored, momentum_of, norm_buffers, norm_layers, set_norm_modes


class Tuned(nn.Module):
    """Runs `learned`, of which some or all weights are trained, and keeps the frozen `base` that it is a copy of.

    Batch-norm statistics are treated as those of a mask with the same config, so that methods differ in what they
    train and in nothing else.
    """

    def __init__(self, base: nn.Module, learned: nn.Module, config: MaskConfig) -> None:
        super().__init__()
        self.base, self.learned, self.config = base.requires_grad_(False), learned, config
        self._anchor = Anchor(base) if config.norm == "anchored" else None
        self.train(learned.training)

    def forward(self, images: Tensor) -> Any:
        if self._anchor is None or not self.training:
            return self.learned(images)
        # What anchored layers see is not yet what they are to use.
        statistics = {name: value.clone() for name, value in norm_buffers(self.learned).items()}
        return self._run({**statistics, **self._anchor.in_training(self.base, self.learned)}, images)

    def _run(self, replacements: dict[str, Tensor], images: Tensor) -> Any:
        return functional_call(self.learned, replacements, (images,), tie_weights=False)

    def train(self, mode: bool = True) -> Tuned:
        super().train(mode)
        self.base.eval()
        if mode:
            set_norm_modes(self.learned, self.config.norm)
        return self

    @torch.no_grad()
    def frozen(self, images: Tensor) -> Any:
        """The output of the untouched base."""
        return self.base(images)

    def anchor(self, batches: Iterable[Tensor]) -> None:
        """As `MaskedModel.anchor`."""
        assert self._anchor is not None
        self._anchor.measure(self.frozen, self.base, batches)

    @torch.no_grad()
    def recalibrate(self, batches: Iterable[Tensor]) -> None:
        """As `MaskedModel.recalibrate`: plain averages over the batches take the place of the statistics."""
        layers = [layer for layer in norm_layers(self.learned).values() if hasattr(layer, "momentum")]
        replaced: dict[str, Tensor] = {}
        if self._anchor is not None:
            layers = [layer for layer in layers if can_be_anchored(layer)]
            replaced = self._anchor.in_training(self.base, self.learned)
        if not layers:
            return
        now = {name: value.clone() for name, value in norm_buffers(self.learned).items()}
        was_training = self.training
        self.eval()
        try:
            for layer in layers:
                layer.train()
            for seen, batch in enumerate(batches, 1):
                with momentum_of(layers, 1 / seen):
                    self._run({**now, **replaced}, batch)
        finally:
            self.train(was_training)
        if self._anchor is not None:
            now |= self._anchor.in_evaluation(self.base, now)
        for name, value in norm_buffers(self.learned).items():
            value.copy_(now[name])


Beside = MaskedModel | Tuned
"""What learns beside a frozen base: both have `base`, `config`, `frozen`, `anchor` and `recalibrate`."""
