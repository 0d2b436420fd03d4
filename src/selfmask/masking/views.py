"""Copies of a base that have other tensors in place, and share the rest."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .direct import unwatch


@torch.no_grad()
def view_of(base: nn.Module, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
    """The base with these weights and buffers in place of its own: modules of the same kinds, in eval mode.

    All its parameters are its own, so that neither can be moved or changed along with the other, but those that are
    not given share their memory with the base's. Buffers are few and may be written to: all are copied.
    """
    parameters = dict(base.named_parameters(remove_duplicate=False))
    own_buffers = dict(base.named_buffers(remove_duplicate=False))
    # By their ids, because that is where a deep copy looks for what was copied before.
    copies: dict[int, Any] = {id(parameter): _fixed(parameter) for parameter in parameters.values()}
    copies |= {id(parameters[name]): _fixed(weight) for name, weight in weights.items()}
    copies |= {id(own_buffers[name]): value.detach().clone() for name, value in buffers.items()}
    view = copy.deepcopy(base, copies).eval()
    unwatch(view)
    for names, own, found in (
        (weights, parameters, dict(view.named_parameters(remove_duplicate=False))),
        (buffers, own_buffers, dict(view.named_buffers(remove_duplicate=False))),
    ):
        for name in names:
            if found.get(name) is not copies[id(own[name])]:  # a module that has ideas of its own about copying
                raise ConfigError(
                    "no view of this base can be made, because copying it does not copy all of its tensors",
                    found=f"another tensor as {name}",
                    todo="use the masked model itself, with using(name)",
                )
    return view


def _fixed(weight: Tensor) -> nn.Parameter:
    """A parameter of this memory that does not learn."""
    return nn.Parameter(weight.detach(), requires_grad=False)
