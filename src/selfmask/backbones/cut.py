"""A network cut at one of its modules: that module's output, pooled, is the vector, and nothing behind it is run."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NotABackboneError, UnknownBackboneError

_SHOWN = 6


class Cut(nn.Module):
    """Images -> the output of the module called `at`, one vector an image.

    Maps [B, C, H, W] (or [B, H, W, C], as some networks have them) are averaged over places, tokens [B, N, C] over all
    but the first `prefix` ones, which stand for no place: class and register tokens. What lies behind is not run, and
    has no tensors any more: nothing of it is masked, trained or in a fingerprint.
    """

    def __init__(self, model: nn.Module, at: str, side: int) -> None:
        super().__init__()
        self.model, self.at = model, at
        self.prefix = _prefix_tokens(model)
        self.places_first = False
        _remove_unused(model, at, side)
        model.get_submodule(at).register_forward_hook(_stop)
        output = _try(self, side)
        # Of square images, maps have two sides alike; where all three are, they are as most networks have them.
        if output.ndim == 4:
            first, second, third = output.shape[1:]
            self.places_first = first == second != third

    def reached(self, images: Tensor) -> Tensor:
        """The module's output as it is."""
        try:
            self.model(images)
        except _ReachedError as error:
            return error.output
        raise NotABackboneError(f"the network does not run {self.at}", todo="name another module: --features")

    def forward(self, images: Tensor) -> Tensor:
        output = self.reached(images)
        if output.ndim == 4:
            return output.mean((1, 2) if self.places_first else (2, 3))
        return output[:, self.prefix :].mean(1) if output.ndim == 3 else output


class _ReachedError(Exception):
    """Carries the output of a module out of the network that goes on with it."""

    def __init__(self, output: Tensor) -> None:
        super().__init__("a cut was reached")
        self.output = output


def _stop(module: nn.Module, inputs: Any, output: Any) -> None:
    raise _ReachedError(output[0] if isinstance(output, tuple | list) else output)


def cut(model: nn.Module, at: str, name: str, side: int) -> Cut:
    """The network called `name`, cut at a module; what cannot be cut there is refused.

    side: of the images that it is tried with.
    """
    modules = [each for each, _ in model.named_modules() if each]
    if at not in modules:
        near = difflib.get_close_matches(at, modules, n=_SHOWN, cutoff=0.5)
        top = [each for each in modules if each.count(".") < 1 + at.count(".")]
        raise UnknownBackboneError(
            f"{name} has no module {at!r}",
            expected=f"a name such as {', '.join((near or top)[:_SHOWN])}",
            todo="name a module whose output is to be the features: --features",
        )
    made = Cut(model, at, side)
    output = _try(made, side)
    if output.ndim not in (2, 3, 4) or output.shape[0] != 2 or 0 in output.shape:
        raise NotABackboneError(
            f"the output of {at} in {name} cannot be made one vector an image",
            expected="an output of shape [images, features], [images, tokens, features] or [images, features, H, W]",
            found=list(output.shape),
            todo="name another module: --features",
        )
    return made


def _try(made: Cut, side: int) -> Tensor:
    """The output at the cut for two images without content."""
    device = next(made.parameters()).device
    with torch.no_grad(), torch.device(device):
        output = made.reached(torch.zeros(2, 3, side, side))
    if not isinstance(output, Tensor):
        raise NotABackboneError(
            f"the output of {made.at} is no tensor", found=type(output).__name__, todo="name another module: --features"
        )
    return output


def _prefix_tokens(model: nn.Module) -> int:
    """How many tokens at the front stand for no place: timm says so, torchvision's networks have a class token."""
    known = getattr(model, "num_prefix_tokens", None)
    return known if isinstance(known, int) else int(isinstance(getattr(model, "class_token", None), Tensor))


def _remove_unused(model: nn.Module, at: str, side: int) -> None:
    """Take away the tensors of modules that the network comes to only behind the cut.

    These are children of what is still running when the cut is reached, and were never called themselves. What a module
    that has ended holds stays, called or not: it may have used it in its own way.
    """
    called, running = set[nn.Module](), list[nn.Module]()

    def enter(module: nn.Module, _: Any) -> None:
        called.add(module)
        running.append(module)

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        running.pop()

    handles = [model.get_submodule(at).register_forward_hook(_stop)]
    for module in model.modules():
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        with torch.no_grad(), torch.device(next(model.parameters()).device):
            model(torch.zeros(2, 3, side, side))
    except _ReachedError:
        pass
    else:
        raise NotABackboneError(f"the network does not run {at}", todo="name another module: --features")
    finally:
        for handle in handles:
            handle.remove()
    ended = called.difference(running[:-1])  # the cut itself counts as ended: what it holds is its own affair
    used = {part for module in ended for part in module.modules()}.union(running)
    behind = [child for module in running[:-1] for child in module.children() if child not in called]
    unused = {part for child in behind for part in child.modules()} - used
    for module in unused.union(running[:-1]):
        for name, child in list(module.named_children()):
            if child in unused and not list(child.children()):
                setattr(module, name, nn.Identity())  # where the network's own code looks for a module, there is one
    for module in unused:
        for tensors in (module._parameters, module._buffers):
            tensors.update(dict.fromkeys(tensors))
