"""What is exported: a plain network with the mask merged in, and what one must know to use it."""

from __future__ import annotations

import copy
import dataclasses
import json
from importlib.metadata import version
from typing import cast

import torch
from torch import Tensor, nn

from ..cascade.combination import CONDITIONAL, UNCONDITIONAL
from ..cascade.model import DISPATCHER, Cascade, expert_name
from ..cascade.router import Router
from ..embedding.embedder import Embedder
from ..errors import ExportError
from ..evaluation.feature_map import FeatureMap
from ..masking import MaskedModel
from ..preprocessing import Preprocessing
from ..running import as_vectors

IMAGES, VECTORS = "images", "vectors"
"""What the input and the output of an exported graph are called."""


@dataclasses.dataclass(frozen=True)
class Network:
    """On the CPU and in eval mode, without gradients."""

    name: str
    """Of the backbone, with that of the file in front of which it stood."""
    backbone: str
    """The name alone."""
    graph: nn.Module
    """Normalised images [B, 3, H, W] -> vectors [B, width], both in float32, with the map if there is one."""
    plain: nn.Module | None
    """The backbone with merged weights, where there is one network and nothing else."""
    preprocessing: Preprocessing
    width: int
    half: bool
    about: dict[str, str]
    """For the file: what made it, and how images must be prepared."""


def network_of(embedder: Embedder, *, half: bool = False) -> Network:
    """The network that gives an embedder's vectors, merged to plain weights; `half`: computed in 16 bits."""
    model = embedder.model
    plain: nn.Module | None = None
    if isinstance(model, Cascade):
        inner: nn.Module = CascadeNetwork(model, embedder.variant)
        base_name = model.masked.base_name
    elif isinstance(model, MaskedModel):
        inner = plain = model.merge_and_unload()
        base_name = model.base_name
    else:
        inner = plain = copy.deepcopy(model)
        base_name = Preprocessing.of_model(model)[0]
    inner = inner.cpu().eval().requires_grad_(False)
    if half:
        inner.half_networks() if isinstance(inner, CascadeNetwork) else inner.half()
    graph = _Graph(inner, embedder.map, half).eval().requires_grad_(False)
    about = {
        "selfmask.version": version("selfmask"),
        "selfmask.name": embedder.name,
        "selfmask.fingerprint": embedder.variants.fingerprint(embedder.variant),
        "selfmask.preprocessing": json.dumps(preparation(embedder.preprocessing)),
        "selfmask.width": str(embedder.width),
        "selfmask.precision": "float16" if half else "float32",
    }
    if embedder.map is not None:
        about["selfmask.map"] = embedder.map.sha256
    return Network(
        name=embedder.name,
        backbone=base_name or "",
        graph=graph,
        plain=plain if embedder.map is None else None,
        preprocessing=embedder.preprocessing,
        width=embedder.width,
        half=half,
        about=about,
    )


def preparation(preprocessing: Preprocessing) -> dict[str, object]:
    """In words that another program can follow: the shorter way to cover the size, its middle, then the scale."""
    height, width = preprocessing.size
    return {
        "resize": "so that both sides cover the size, with antialiasing",
        "interpolation": preprocessing.interpolation,
        "crop": "centre",
        "size": [height, width],
        "channels": "RGB",
        "scale": 1 / 255,
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
    }


class _Graph(nn.Module):
    """The network and its map, in float32 at both ends."""

    def __init__(self, network: nn.Module, whiten: FeatureMap | None, half: bool) -> None:
        super().__init__()
        self.network, self.half_inside = network, half
        self.whiten = None if whiten is None else _Whiten(whiten)

    def forward(self, images: Tensor) -> Tensor:
        vectors = as_vectors(self.network(images.half() if self.half_inside else images)).float()
        return vectors if self.whiten is None else cast(Tensor, self.whiten(vectors))


class _Whiten(nn.Module):
    """A map of vectors as two tensors. In float32, though maps compute in float64: few runtimes have that on a GPU."""

    def __init__(self, whiten: FeatureMap) -> None:
        super().__init__()
        self.register_buffer("mean", whiten.mean.float().cpu().clone())
        self.register_buffer("matrix", whiten.matrix.float().cpu().clone())

    def forward(self, vectors: Tensor) -> Tensor:
        return (vectors - cast(Tensor, self.mean)) @ cast(Tensor, self.matrix)


class CascadeNetwork(nn.Module):
    """A cascade as one graph: graphs cannot choose what to run, so every expert runs on every image.

    Of the conditional combination, the vectors of the expert that the router chooses are taken. It is as large as all
    networks together.
    """

    def __init__(self, cascade: Cascade, variant: str) -> None:
        super().__init__()
        if variant not in (CONDITIONAL, UNCONDITIONAL):
            raise ExportError(f"{variant} is no combination", expected=f"{CONDITIONAL} or {UNCONDITIONAL}")
        self.conditional = variant == CONDITIONAL
        # Copies, because views share the memory of what is not masked, and one is converted after the other.
        views = [copy.deepcopy(cascade.masked.view(name)) for name in (DISPATCHER, *_experts(cascade))]
        self.dispatcher, self.experts = views[0], nn.ModuleList(views[1:])
        combination = cascade.combinations[variant]
        self.register_buffer("blocks", combination.blocks.clone())
        self.register_buffer("offset", combination.offset.clone())
        for field in dataclasses.fields(Router):
            self.register_buffer(field.name, getattr(cascade.router, field.name).clone())

    def half_networks(self) -> None:
        """Not the router and the combination: their numbers are too far apart for 16 bits."""
        self.dispatcher.half()
        self.experts.half()

    def forward(self, images: Tensor) -> Tensor:
        first = as_vectors(self.dispatcher(images)).float()
        blocks, offset = cast(Tensor, self.blocks), cast(Tensor, self.offset)
        combined = first @ blocks[0] - offset
        router = Router(*(getattr(self, field.name) for field in dataclasses.fields(Router)))
        chosen = router.scores(first).argmax(1) if self.conditional else None
        for number, expert in enumerate(self.experts):
            part = as_vectors(expert(images)).float() @ blocks[1 + number]
            combined = combined + (part if chosen is None else torch.where((chosen == number)[:, None], part, 0.0))
        return combined


def _experts(cascade: Cascade) -> list[str]:
    return [expert_name(number) for number in range(cascade.experts)]
