"""SGD whose learning rate means the same to every tensor of every backbone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_MEMORY = 0.95  # of the running mean of squared gradients: about the last 20 steps


class PerTensorSGD(torch.optim.SGD):
    """SGD; in groups with `per_tensor`, a tensor's gradient is divided by its own root mean square over recent steps.

    Gradients of scores differ by orders of magnitude between backbones, and between layers of one: a rate that flips
    nothing here flips everything there. In units of its own size, a gradient needs one rate only. Within a tensor
    nothing changes: there it is plain SGD. A rate of 0 only measures.

    together: parameters that count as one tensor, cut into pieces: the root mean square is that of all of them.
    """

    def __init__(self, params: Any, *, together: Iterable[Sequence[nn.Parameter]] = (), **settings: Any) -> None:
        super().__init__(params, **settings)
        self._kin = {id(parameter): list(whole) for whole in together for parameter in whole}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["per_tensor"]:
                continue
            learning = [parameter for parameter in group["params"] if parameter.grad is not None]
            squares = [self._mean_square(parameter) for parameter in learning]  # of all, before any is divided
            for parameter, square in zip(learning, squares, strict=True):
                state = self.state[parameter]
                mean_square, weight = state.get("mean_square", 0.0), state.get("weight", 0.0)
                state["mean_square"] = _MEMORY * mean_square + (1 - _MEMORY) * square
                state["weight"] = _MEMORY * weight + (1 - _MEMORY)
                if group["lr"] == 0:
                    parameter.grad = None
                    continue
                tiny = torch.finfo(parameter.dtype).tiny ** 0.5  # squares of smaller gradients are no numbers any more
                parameter.grad.div_((state["mean_square"] / state["weight"]).sqrt().clamp(min=tiny))
        super().step()
        return loss

    def _mean_square(self, parameter: nn.Parameter) -> Tensor:
        whole = [each.grad for each in self._kin.get(id(parameter), [parameter]) if each.grad is not None]
        if len(whole) == 1:
            return whole[0].square().mean()
        return torch.stack([gradient.square().sum() for gradient in whole]).sum() / sum(each.numel() for each in whole)
