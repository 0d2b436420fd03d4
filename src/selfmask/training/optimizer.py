"""SGD whose learning rate means the same to every tensor of every backbone."""

from __future__ import annotations

from typing import Any

import torch

_MEMORY = 0.95  # of the running mean of squared gradients: about the last 20 steps


class PerTensorSGD(torch.optim.SGD):
    """SGD; in groups with `per_tensor`, a tensor's gradient is divided by its own root mean square over recent steps.

    Gradients of scores differ by orders of magnitude between backbones, and between layers of one: a rate that flips
    nothing here flips everything there. In units of its own size, a gradient needs one rate only. Within a tensor
    nothing changes: there it is plain SGD. A rate of 0 only measures.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["per_tensor"]:
                continue
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean_square, weight = state.get("mean_square", 0.0), state.get("weight", 0.0)
                state["mean_square"] = _MEMORY * mean_square + (1 - _MEMORY) * parameter.grad.square().mean()
                state["weight"] = _MEMORY * weight + (1 - _MEMORY)
                if group["lr"] == 0:
                    parameter.grad = None
                    continue
                tiny = torch.finfo(parameter.dtype).tiny ** 0.5  # squares of smaller gradients are no numbers any more
                parameter.grad.div_((state["mean_square"] / state["weight"]).sqrt().clamp(min=tiny))
        super().step()
        return loss
