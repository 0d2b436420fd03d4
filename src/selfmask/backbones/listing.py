"""Which backbones can be named, how large they are, and whether their weights are on this machine."""

from __future__ import annotations

import dataclasses
import importlib.util
from fnmatch import fnmatchcase

from ..errors import NotABackboneError, UnknownBackboneError
from . import clip, publishers, timm_models, transformers_clip, vit
from .loading import TINY, VIT, closest, output_width, resolve, without_weights

LIMIT = 30
"""So many are looked at closely; each takes a tenth of a second or more."""
_WELL_KNOWN = (
    "resnet18.a1_in1k",
    "resnet50.a1_in1k",
    "convnext_tiny.fb_in22k",
    "tf_efficientnet_lite0.in1k",
    "mobilenetv3_large_100.ra_in1k",
    "swin_tiny_patch4_window7_224.ms_in1k",
    "vit_small_patch16_224.dino",
    "vit_base_patch16_224.dino",
    "vit_small_patch14_dinov2.lvd142m",
    "vit_base_patch14_dinov2.lvd142m",
    "vit_small_patch16_dinov3.lvd1689m",
    "vit_base_patch32_clip_224.openai",
)


@dataclasses.dataclass(frozen=True)
class BackboneInfo:
    """What can be told of a backbone without its weights."""

    name: str
    width: int
    parameters: int
    size: tuple[int, int]
    local: bool
    """Whether its weights are on this machine."""
    source: str
    """Where they come from."""


def list_backbones(pattern: str | None = None) -> list[BackboneInfo]:
    """The first `LIMIT` backbones whose names match (`names` tells them all); without a pattern, a short choice.

    The few networks of timm that give no vectors when their classifier is taken off are left out.
    """
    return [info for name in names(pattern)[:LIMIT] if (info := _look_at(name)) is not None]


def names(pattern: str | None = None) -> list[str]:
    """The names that match a pattern like `*clip*`, or contain the text: ours first, then those that start with it.

    All have published weights; other architectures of timm, and other CLIPs of the hub, can be named too. Without a
    pattern: ours, a dozen that are well known, and those whose weights are on this machine.
    """
    ours = [TINY, *([VIT] if vit.WEIGHTS.is_file() else []), *publishers.names()]
    if pattern is None:
        return list(dict.fromkeys([*ours, *_WELL_KNOWN, *timm_models.names_here()]))
    known = [*ours, *timm_models.names()]
    if importlib.util.find_spec("open_clip") is not None or pattern.startswith(clip.PREFIX):
        known += clip.names()
    if importlib.util.find_spec("transformers") is not None or pattern.startswith(transformers_clip.PREFIX):
        known += transformers_clip.names()
    text = pattern.lower().removeprefix("timm/")
    wanted = text if set(text) & set("*?[") else f"*{text}*"
    found = [name for name in known if fnmatchcase(name.lower(), wanted)]
    found.sort(key=lambda name: name not in ours and not name.lower().startswith(text))
    if not found:
        raise UnknownBackboneError(
            f"no backbone with published weights matches {pattern!r}",
            expected=f"part of a name such as {', '.join(closest(pattern, known) or _WELL_KNOWN[:3])}",
            todo="use * for any text, or list well-known backbones with `selfmask backbones`",
        )
    return found


def _look_at(name: str) -> BackboneInfo | None:
    recipe = resolve(name)
    model = without_weights(recipe)
    try:
        width = output_width(model, recipe, name)
    except NotABackboneError:
        return None
    return BackboneInfo(
        name,
        width,
        sum(parameter.numel() for parameter in model.parameters()),
        recipe.preprocessing.size,
        recipe.source is not None and recipe.source.local() is not None,
        recipe.source.where if recipe.source is not None else "",
    )
