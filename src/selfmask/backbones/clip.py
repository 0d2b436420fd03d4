"""Image towers of open_clip: `open_clip/ARCH` or `open_clip/ARCH:TAG`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import MissingExtraError
from ..maskfile import Preprocessing
from .recipe import Recipe
from .sources import HubFile, Source
from .weights import load_weights

PREFIX = "open_clip/"
# Only the image tower is kept, so the text tower is the smallest that can be built.
_TEXT = {"context_length": 8, "vocab_size": 8, "width": 64, "heads": 1, "layers": 1}


def names() -> list[str]:
    """All architectures with each of their tags."""
    return [PREFIX + name for name in _open_clip().list_pretrained(as_str=True)]


def all_names() -> list[str]:
    return [*(PREFIX + name for name in _open_clip().list_models()), *names()]


def resolve(name: str) -> Recipe | None:
    """Without a tag: the weights that open_clip lists first, and their settings."""
    if not name.startswith(PREFIX):
        return None
    open_clip = _open_clip()
    architecture, _, tag = name.removeprefix(PREFIX).partition(":")
    if architecture not in open_clip.list_models() or (tag and not open_clip.is_pretrained_cfg(architecture, tag)):
        return None
    tags = [tag] if tag else open_clip.list_pretrained_tags_by_model(architecture)
    published: dict[str, Any] = open_clip.get_pretrained_cfg(architecture, tags[0]) if tags else {}
    size = open_clip.get_model_config(architecture)["vision_cfg"]["image_size"]
    preprocessing = Preprocessing(
        (size, size) if isinstance(size, int) else (size[0], size[1]),
        tuple(published.get("mean") or open_clip.OPENAI_DATASET_MEAN),
        tuple(published.get("std") or open_clip.OPENAI_DATASET_STD),
        published.get("interpolation") or "bicubic",
    )

    def build() -> nn.Module:
        return _build(architecture, quick_gelu=bool(published.get("quick_gelu")))

    def load(path: Path) -> nn.Module:
        model = build()
        load_weights(model, path, name)
        return model

    return Recipe(build, preprocessing, _source(published), load)


def _build(architecture: str, quick_gelu: bool) -> nn.Module:
    with _quiet():
        model = _open_clip().create_model(
            architecture, force_quick_gelu=quick_gelu, device=torch.get_default_device(), text_cfg=dict(_TEXT)
        )
    tower: nn.Module = model.visual
    if getattr(tower, "output_tokens", False):
        tower.output_tokens = False  # type: ignore[assignment]  # vectors only
    return tower


def _source(published: dict[str, Any]) -> Source | None:
    if not published.get("hf_hub"):
        return None
    repo, _, file = published["hf_hub"].rpartition("/")
    if file:
        return HubFile(repo, (str(Path(file).with_suffix(".safetensors")), file))
    return HubFile(repo, ("open_clip_model.safetensors", "open_clip_pytorch_model.bin"))


def _open_clip() -> ModuleType:
    try:
        import open_clip
    except ImportError as error:
        raise MissingExtraError(
            "open_clip is not installed",
            found=str(error),
            todo='pip install "selfmask[clip]"; timm has many CLIP towers too: selfmask backbones "*clip*"',
        ) from error
    module: ModuleType = open_clip
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """open_clip writes to the root logger, which would set up logging for the whole program."""
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)
