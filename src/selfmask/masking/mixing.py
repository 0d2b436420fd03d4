"""Images of different masks in one pass: what their masks share is done once for all of them.

What a batch saves is that weights are brought from memory once for all of its images. Where the images are of different
masks, each layer masks its weights as they come, for every image by its own mask (`masked_product.py`). 1 / alpha and
the statistics of norm layers are numbers for each image and channel. Sums are rounded in another order than in a view
of the mask, so this is not the same to the bit: it is as near as a batch of another size.

Layers that use each weight in many places of an image gain nothing by it: there, each mask has weights written for it.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..running import as_vectors
from .mixed_masks import Own, Plan
from .norms import norm_buffers, saved_statistics
from .selection import tied_names
from .switching import OffWeights, SpareView, Switch
from .views import view_of

if TYPE_CHECKING:
    from .mixed_view import MixedView

_NEAR = 1e-5
_log = logging.getLogger(__name__)


class Mixing:
    """How a base runs images of different masks. Threads may share it; each has a `view` of its own."""

    def __init__(self, plan: Plan, size: tuple[int, int]) -> None:
        self._plan, self.size = plan, size
        self._norms = {*plan.means, *plan.variances}

    @staticmethod
    def of(base: nn.Module, size: tuple[int, int]) -> Mixing | None:
        """None where images of different masks cannot share a pass of this base, of images of this size. That is tried,
        because a base may do as it likes with its layers and with the order of images."""
        if find_spec("numba") is None:  # of the extra `serve`
            return None
        try:
            with torch.inference_mode(False), torch.no_grad():
                found = Mixing(_plan(base, size), size)
                return found if found._plan.places and found._is_right() else None
        except Exception as error:  # whatever it does in its layers: passes of their own are always right
            _log.info("images of different masks cannot share a pass: %s: %s", type(error).__name__, error)
            return None

    def takes(self, switch: Switch) -> bool:
        """Whether images of a mask can be among them: of one that covers nothing but weights of the plan's layers and
        statistics of its norms."""
        channels = self._plan.channels
        return (
            channels.keys() >= switch.off.keys()
            and self._norms >= switch.norm.keys()
            and all(channels[name] % len(off.scales) == 0 for name, off in switch.off.items())
        )

    def own(self, switch: Switch) -> Own:
        return Own.of(switch, self._plan)

    def view(self) -> MixedView:
        from .mixed_view import MixedView  # which needs numba

        return MixedView(self._plan)

    def _is_right(self) -> bool:
        """Whether some images get the vectors that views of some masks give."""
        base, random = self._plan.base, np.random.default_rng(0)
        weights = {name: base.get_parameter(name) for name in self._plan.places}
        norm = {name: value * 1.1 for name, value in saved_statistics(norm_buffers(base)).items()}
        masks = [(Switch({}, {}), 1)]
        for share, count in ((0.05, 2), (0.001, 1)):
            on = {name: random.random(weight.numel()) >= share for name, weight in weights.items()}
            masks.append((Switch({name: OffWeights.of(each, (1.01,)) for name, each in on.items()}, norm), count))
        if not all(self.takes(each) for each, _ in masks):
            return False
        images = torch.rand(4, 3, *self.size, generator=torch.Generator().manual_seed(0))
        images = images.contiguous(memory_format=torch.channels_last)
        mixed, spare, counts = self.view(), SpareView(base), [count for _, count in masks]
        mixed.put([(self.own(each), count) for each, count in masks])
        found = as_vectors(mixed.module(images))
        for (each, _), own, vectors in zip(
            masks, images.split_with_sizes(counts), found.split_with_sizes(counts), strict=True
        ):
            spare.put(each)
            if not torch.allclose(vectors, as_vectors(spare.module(own)), rtol=_NEAR, atol=_NEAR):
                return False
        return True


def _plan(base: nn.Module, size: tuple[int, int]) -> Plan:
    """Of the layers that run when the base does, those that are plain."""
    view, places = view_of(base, {}, {}), dict[str, int]()

    def note(module: Any, output: Tensor, name: str) -> None:
        places[name] = output[0].numel() // len(module.weight)

    for name, module in _plain_layers(view).items():
        module.register_forward_hook(lambda module, _, output, name=name: note(module, output, name))
    view(torch.zeros(1, 3, *size))
    norms = [
        name
        for name, each in base.named_modules()
        if type(each) is nn.BatchNorm2d and each.running_mean is not None and each.running_mean.device.type == "cpu"
    ]
    return Plan(base, places, tuple(norms))


def _plain_layers(base: nn.Module) -> dict[str, nn.Module]:
    """By the names of their weights, which are theirs alone."""
    named = dict(base.named_parameters(remove_duplicate=False))
    modules = ((f"{name}.weight", each) for name, each in base.named_modules())
    found = {name: each for name, each in modules if name in named and _is_plain(each)}
    places = tied_names(base, list(found))
    return {name: each for name, each in found.items() if places.get(name) == [name]}


def _is_plain(module: nn.Module) -> bool:
    """Whether every output of a layer depends on all channels, in a way that `mixed_view.py` knows."""
    if type(module) is nn.Conv2d:
        known = module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    else:
        known = type(module) is nn.Linear
    weight: Any = getattr(module, "weight", None)
    return known and weight.device.type == "cpu" and weight.dtype == torch.float32
