"""From a name to a frozen network that maps images to vectors, and how its images must be prepared."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from ..errors import NotABackboneError, UnknownBackboneError, WeightsUnavailableError, WrongBaseError
from ..preprocessing import Preprocessing
from . import clip, publishers, timm_models, tiny, transformers_clip, vit
from .cut import cut
from .recipe import Recipe
from .sources import HubFile, InstalledFile, check_sha256, fetch
from .weights import load_weights

TINY, VIT = "selfmask/tiny", "selfmask/vit"
_SEED = 0
_PIN = re.compile(r"(.+)@(?:sha256:([0-9a-f]{64})|([0-9a-f]{40}))")


@dataclasses.dataclass(frozen=True)
class Backbone:
    """A network with what one must know to use it."""

    name: str
    """As the user named it; a mask file keeps it as the name of its base."""
    model: nn.Module
    """In float32 and eval mode: normalised images [B, 3, H, W] -> vectors [B, width]."""
    preprocessing: Preprocessing
    width: int
    note: str = ""
    """Where the weights came from."""


def load_backbone(
    name: str,
    *,
    weights: Path | None = None,
    pretrained: bool = True,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Backbone:
    """The backbone of that name with its published weights, with those of a file, or with random ones.

    `name` is any name of timm (`resnet50`, `vit_small_patch16_224.dino`), `swav/resnet50`, `dino/resnet50`,
    `open_clip/ARCH`, `open_clip/ARCH:TAG`, `transformers/FOLDER`, `transformers/OWNER/NAME`, `selfmask/tiny` or
    `selfmask/vit`; with
    `@sha256:HASH` behind it, only a file of weights with that hash will do, with `@COMMIT`, that of the hub. With
    `#MODULE` behind all that, the network is cut there: the output of that module, pooled, is the vector (`Cut`).
    `weights` is a .safetensors, .pt or .pth file; code in it is never run. Published weights that are not on this
    machine are downloaded; random ones are always the same. `shapes` are tensors that it must have: a network without
    them is refused before anything is downloaded, read or given memory.
    """
    recipe = resolve(name)
    preprocessing, (whole, at) = recipe.preprocessing, divided(name)
    outline = without_weights(recipe)
    if at is not None:
        outline = cut(outline, at, whole, max(preprocessing.size))
    _check_shapes(outline, shapes or {}, name)
    width = output_width(outline, recipe, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model, note = _with_weights(whole, recipe, None if weights is None else Path(weights), pretrained)
    model = model.float().eval()
    if at is not None:
        model = cut(model, at, whole, max(preprocessing.size)).eval()
    # As timm does it, so that whoever meets the network alone (a mask of it, say) knows its name and preparation.
    model.pretrained_cfg = {  # type: ignore[assignment]
        "architecture": name,
        "input_size": (3, *preprocessing.size),
        "mean": preprocessing.mean,
        "std": preprocessing.std,
        "interpolation": preprocessing.interpolation,
    }
    return Backbone(name, model, preprocessing, width, note)


def at_hand(name: str, weights: Path | None) -> bool:
    """Whether a name that only a file gives may be followed without asking anyone.

    It may where its architecture is ours or timm's, built by installed code alone, and its weights are on this machine
    already, or in a file that is given. What lies in a folder or a repository that the name points to, in a cache of
    those too, may not: those files say what is built.
    """
    if name.startswith((clip.PREFIX, transformers_clip.PREFIX)):
        return False
    source = resolve(name).source
    return weights is not None or (source is not None and source.local() is not None)


def _check_shapes(outline: nn.Module, shapes: Mapping[str, tuple[int, ...]], name: str) -> None:
    own = outline.state_dict()
    for key, shape in shapes.items():
        found = tuple(own[key].shape) if key in own else "no such tensor"
        if found != shape:
            raise WrongBaseError(
                f"the file was made for another backbone than {name}",
                expected=f"{key[:200]} of shape {shape}",
                found=found,
                todo="name the backbone it was made for: --backbone NAME",
            )


def resolve(name: str) -> Recipe:
    """What the name stands for, uncut; nothing is built, and no weights are downloaded or read."""
    name = divided(name)[0]
    if (pinned := _PIN.fullmatch(name)) is not None:
        recipe = resolve(pinned[1])
        if pinned[2]:
            return dataclasses.replace(recipe, sha256=pinned[2])
        if not isinstance(recipe.source, HubFile):
            raise UnknownBackboneError(
                f"the weights of {pinned[1]} are not on the Hugging Face hub, so they have no commit",
                todo=f"give their hash instead: {pinned[1]}@sha256:HASH",
            )
        return dataclasses.replace(recipe, source=dataclasses.replace(recipe.source, revision=pinned[3]))
    if name in _OURS:
        return _ours(name)
    found = publishers.resolve(name) or clip.resolve(name) or transformers_clip.resolve(name)
    found = found or timm_models.resolve(name)
    if found is not None:
        return found
    known = (
        clip.all_names() if name.startswith(clip.PREFIX) else [*_OURS, *publishers.names(), *timm_models.all_names()]
    )
    raise UnknownBackboneError(
        f"there is no backbone {name!r}",
        expected=f"a name such as {', '.join(closest(name, known) or known[:3])}",
        todo="list names with `selfmask backbones PATTERN`",
    )


def divided(name: str) -> tuple[str, str | None]:
    """The name of the whole network, and the module that it is cut at, if it is."""
    whole, _, at = name.partition("#")
    return whole, at or None


def unpinned(name: str) -> str:
    """The name without what says which file of weights is meant."""
    pinned = _PIN.fullmatch(name)
    return name if pinned is None else pinned[1]


def closest(name: str, known: list[str]) -> list[str]:
    """The known names most like this one, best first."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=4)]


def without_weights(recipe: Recipe) -> nn.Module:
    """The network as a shape alone: it takes no memory and computes nothing."""
    with torch.device("meta"):
        return recipe.build().eval()


def output_width(model: nn.Module, recipe: Recipe, name: str) -> int:
    """How long the vectors are that a network without weights would give."""
    try:
        with torch.no_grad(), torch.device("meta"):
            output = model(torch.empty(2, 3, *recipe.preprocessing.size))
    except RuntimeError:  # the rare network that looks at the values on its way
        if not hasattr(model, "num_features"):
            raise
        return int(model.num_features)  # type: ignore[arg-type]
    if not isinstance(output, torch.Tensor) or output.ndim != 2 or not output.shape[1]:
        raise NotABackboneError(
            f"{name} cannot serve as a backbone",
            expected="one vector per image",
            found=f"a {type(output).__name__} of shape {tuple(getattr(output, 'shape', ()))}",
            todo="choose another; in Python, wrap the model so that it returns one vector per image",
        )
    return output.shape[1]


def _with_weights(name: str, recipe: Recipe, weights: Path | None, pretrained: bool) -> tuple[nn.Module, str]:
    if weights is not None:
        check_weights(recipe, weights, name)
        model = recipe.build()
        load_weights(model, weights, name, recipe.translate(model))
        return model, f"weights from {weights}"
    if not pretrained:
        return recipe.build(), f"random weights, seed {_SEED}"
    if recipe.source is None:
        raise WeightsUnavailableError(
            f"no published weights exist for {name}",
            todo=f"pass a file as --weights (in Python: weights=), or choose from `selfmask backbones {name}`",
        )
    path = fetch(recipe.source, name)
    check_weights(recipe, path, name)
    return recipe.load(path), f"weights from {recipe.source.where}"


def check_weights(recipe: Recipe, path: Path, name: str) -> None:
    """That a file is the one that the name asks for, if it does."""
    if recipe.sha256 is not None and path.is_file():
        check_sha256(path, recipe.sha256, name)


_OURS: Mapping[str, tuple[ModuleType, type[nn.Module]]] = {TINY: (tiny, tiny.TinyResNet), VIT: (vit, vit.SmallViT)}
"""Networks of this package, and the modules that say where their weights are."""


def _ours(name: str) -> Recipe:
    module, network = _OURS[name]

    def load(path: Path) -> nn.Module:
        model = network()
        load_weights(model, path, name)
        return model

    todo = "install the package again; or train them: `selfmask pretrain`; or pass a file as --weights"
    return Recipe(network, tiny.PREPROCESSING, InstalledFile(module.WEIGHTS, todo), load, licence="apache-2.0")
