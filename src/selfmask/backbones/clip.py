"""The towers of open_clip: `open_clip/ARCH` or `open_clip/ARCH:TAG`."""

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
from ..preprocessing import Preprocessing
from .recipe import Recipe, TextTower
from .sources import HubFile, Source, fetch
from .weights import load_weights

PREFIX = "open_clip/"
# Only one tower is kept, so the other is the smallest that can be built.
_TEXT = {"context_length": 8, "vocab_size": 8, "width": 64, "heads": 1, "layers": 1}
_IMAGE = {"image_size": 32, "patch_size": 32, "width": 64, "head_width": 64, "layers": 1}


def names() -> list[str]:
    """All architectures with each of their tags."""
    return [PREFIX + name for name in _open_clip().list_pretrained(as_str=True)]


def all_names() -> list[str]:
    return [*(PREFIX + name for name in _open_clip().list_models()), *names()]


def resolve(name: str) -> Recipe | None:
    """Without a tag: the weights that open_clip lists first, and their settings."""
    if (found := _find(name)) is None:
        return None
    architecture, published = found
    open_clip = _open_clip()
    size = open_clip.get_model_config(architecture)["vision_cfg"]["image_size"]
    preprocessing = Preprocessing(
        (size, size) if isinstance(size, int) else (size[0], size[1]),
        tuple(published.get("mean") or open_clip.OPENAI_DATASET_MEAN),
        tuple(published.get("std") or open_clip.OPENAI_DATASET_STD),
        published.get("interpolation") or "bicubic",
    )

    def build() -> nn.Module:
        tower: nn.Module = _create(architecture, published, text_cfg=dict(_TEXT)).visual
        if getattr(tower, "output_tokens", False):
            tower.output_tokens = False  # type: ignore[assignment]  # vectors only
        return tower

    def load(path: Path) -> nn.Module:
        model = build()
        load_weights(model, path, name)
        return model

    return Recipe(build, preprocessing, _source(published), load)


def text_tower(name: str) -> TextTower | None:
    if (found := _find(name)) is None:
        return None
    architecture, published = found
    settings = _open_clip().get_model_config(architecture)["text_cfg"]
    # What some architectures keep elsewhere on the hub: asked for here, with less patience than the libraries have.
    for key, file in (("hf_model_name", "config.json"), ("hf_tokenizer_name", "tokenizer_config.json")):
        if repo := settings.get(key):
            fetch(HubFile(repo, (file,)), name)
    with _quiet():
        tokenizer = _open_clip().get_tokenizer(architecture)
    model = _create(architecture, published, vision_cfg=dict(_IMAGE), pretrained_hf=False)
    del model.visual
    return TextTower(model, tokenizer, model.encode_text)


def _find(name: str) -> tuple[str, dict[str, Any]] | None:
    """The architecture, and what open_clip knows of its published weights."""
    if not name.startswith(PREFIX):
        return None
    open_clip = _open_clip()
    architecture, _, tag = name.removeprefix(PREFIX).partition(":")
    if architecture not in open_clip.list_models() or (tag and not open_clip.is_pretrained_cfg(architecture, tag)):
        return None
    tags = [tag] if tag else open_clip.list_pretrained_tags_by_model(architecture)
    return architecture, open_clip.get_pretrained_cfg(architecture, tags[0]) if tags else {}


def _create(architecture: str, published: dict[str, Any], **options: Any) -> Any:
    quick_gelu = bool(published.get("quick_gelu"))
    with _quiet():
        return _open_clip().create_model(
            architecture, force_quick_gelu=quick_gelu, device=torch.get_default_device(), **options
        )


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
            todo='pip install "selfmask[clip]"; or use a CLIP image tower from timm: selfmask backbones "*clip*"',
        ) from error
    module: ModuleType = open_clip
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """open_clip writes to the root logger: that sets up logging for the whole program, and warns of random weights."""
    handler = logging.NullHandler()

    def refuse(record: logging.LogRecord) -> bool:
        return False

    logging.root.addHandler(handler)
    logging.root.addFilter(refuse)  # of the root logger's own records alone, not of those that come up to it
    try:
        yield
    finally:
        logging.root.removeFilter(refuse)
        logging.root.removeHandler(handler)
