"""What of a backbone learns: a mask, everything, nothing, low-rank matrices, or biases and norms."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import ConfigError, MissingExtraError
from ..masking import MaskConfig, MaskedModel, get_masked_model
from ..masking.norms import norm_buffers, norm_layers
from ..masking.selection import select_parameters
from .beside import Beside, Tuned

MethodName = Literal["mask", "full", "linear", "lora", "bitfit"]
Follow = Literal["ours", "paper"]
"""Whose choice holds where settings leave it to the method."""


@dataclasses.dataclass(frozen=True)
class Learner:
    """A model that the loop can train, what of it learns, and what a file must keep of it."""

    model: nn.Module
    parameters: list[nn.Parameter]
    targets: tuple[str, ...] = ()
    """The layers that got low-rank matrices."""

    @property
    def masked(self) -> MaskedModel | None:
        """The model, if a mask is what learns."""
        return self.model if isinstance(self.model, MaskedModel) else None

    @property
    def beside(self) -> Beside | None:
        """The model, if it keeps the frozen backbone beside what learns."""
        return self.model if isinstance(self.model, MaskedModel | Tuned) else None

    @property
    def frozen(self) -> nn.Module:
        """The backbone as it was, until training begins."""
        return self.model if self.beside is None else self.beside.base

    def kept(self) -> dict[str, Tensor]:
        """The tensors that training may have changed: what it trains, and the statistics of norm layers."""
        trained = {id(parameter) for parameter in self.parameters}
        model = self.model.learned if isinstance(self.model, Tuned) else self.model
        kept = {name: p.detach() for name, p in model.named_parameters() if id(p) in trained}
        return (kept | norm_buffers(model)) if kept else {}


def prepare(model: nn.Module, method: MethodName, mask: MaskConfig, rank: int = 8, follow: Follow = "ours") -> Learner:
    """Make `model` ready to be trained by a method; it may be changed in place.

    mask: of the method "mask"; "lora" puts its matrices, of this rank, beside the weights that such a mask selects, and
    "full" trains only those if it is to follow the paper.
    """
    if method == "mask":
        masked = get_masked_model(model, mask)
        return Learner(masked, list(masked.scores.parameters()))
    model.requires_grad_(False)
    if method == "linear":
        return Learner(Frozen(model), [])
    if method == "lora":
        targets = lora_targets(model, mask, rank)
        add_lora(model, targets, rank)
        return Learner(model, [p for p in model.parameters() if p.requires_grad], targets)
    if method == "bitfit":
        names = biases_and_norms(model)
    elif follow == "paper":
        names = select_parameters(model, mask)
    else:
        names = [name for name, _ in model.named_parameters()]
    chosen = [model.get_parameter(name) for name in names]
    for parameter in chosen:
        parameter.requires_grad_()
    if not chosen:
        raise ConfigError("the backbone has neither biases nor norm layers to train", todo="choose another --method")
    return Learner(model, chosen)


def prepare_beside(
    model: nn.Module, method: MethodName, mask: MaskConfig, rank: int = 8, follow: Follow = "ours"
) -> Learner:
    """The same without touching the model: what is learned can be compared with it at any time, and given up."""
    if method == "mask":
        return prepare(model, method, mask)
    own = prepare(copy.deepcopy(model), method, mask, rank, follow)
    return Learner(Tuned(model, own.model, mask), own.parameters, own.targets)


def frozen_beside(model: nn.Module, mask: MaskConfig) -> Learner:
    """What is left where another method than a mask gained nothing: a copy like its base that learns no more."""
    return Learner(Tuned(model, copy.deepcopy(model), mask), [])


class Frozen(nn.Module):
    """A model that never trains and has no gradient, whatever the loop says."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.model.eval()
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        vectors: Tensor = self.model(images)
        return vectors


def biases_and_norms(model: nn.Module) -> list[str]:
    """BitFit's: every bias, and scale and bias of every norm layer."""
    inside = {f"{name}." for name in norm_layers(model)}
    inside |= {f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm | nn.GroupNorm)}
    return [
        name
        for name, _ in model.named_parameters()
        if name.rpartition(".")[2] == "bias" or name.endswith("_bias") or any(map(name.startswith, inside))
    ]


def lora_targets(model: nn.Module, mask: MaskConfig, rank: int) -> tuple[str, ...]:
    """The layers whose weights a mask would select, as far as low-rank matrices can stand beside them."""
    found: dict[str, None] = {}
    for name in select_parameters(model, mask):
        layer = name.rpartition(".")[0]
        module = model.get_submodule(layer)
        if isinstance(module, nn.modules.conv._ConvNd) and rank % module.groups:
            continue  # depthwise convolutions have no rank to speak of
        if isinstance(module, nn.Linear | nn.MultiheadAttention | nn.modules.conv._ConvNd):
            # The output projection of an attention layer belongs to it, and gets its matrices with it.
            inner = any(isinstance(model.get_submodule(outer), nn.MultiheadAttention) for outer in _outer(layer))
            if not inner:
                found[layer] = None
    if not found:
        raise ConfigError("no layer of the backbone supports LoRA", todo="choose another --method")
    return tuple(found)


def _outer(layer: str) -> list[str]:
    parts = layer.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def need_peft() -> None:
    if find_spec("peft") is None:
        raise MissingExtraError("peft is not installed", todo='pip install "selfmask[lora]"')


def add_lora(model: nn.Module, targets: Sequence[str], rank: int) -> None:
    """Put low-rank matrices beside the weights of these layers, in place; only they are trainable."""
    need_peft()
    from peft import LoraConfig, inject_adapter_in_model

    pattern = "|".join(map(re.escape, targets))  # as one expression: names in a list would match by their ends
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=f"(?:{pattern})"), model)
