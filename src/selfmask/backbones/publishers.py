"""ResNet-50 as its inventors published it: trained without labels, by SwAV and by DINO."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import timm
from torch import nn

from ..preprocessing import Preprocessing
from .recipe import Recipe
from .sources import WebFile
from .weights import load_weights

_MEAN: Final = (0.485, 0.456, 0.406)
# SwAV was trained, and is evaluated by its authors, with 0.228 where everybody else has 0.229.
_PUBLISHED = {
    "swav/resnet50": (
        "https://dl.fbaipublicfiles.com/deepcluster/swav_800ep_pretrain.pth.tar",
        Preprocessing((224, 224), _MEAN, (0.228, 0.224, 0.225), "bilinear"),
    ),
    "dino/resnet50": (
        "https://dl.fbaipublicfiles.com/dino/dino_resnet50_pretrain/dino_resnet50_pretrain.pth",
        Preprocessing((224, 224), _MEAN, (0.229, 0.224, 0.225), "bicubic"),
    ),
}


def names() -> list[str]:
    return list(_PUBLISHED)


def resolve(name: str) -> Recipe | None:
    if name not in _PUBLISHED:
        return None
    address, preprocessing = _PUBLISHED[name]

    def load(path: Path) -> nn.Module:
        model = _build()
        load_weights(model, path, name)
        return model

    return Recipe(_build, preprocessing, WebFile(address), load)


def _build() -> nn.Module:
    model: nn.Module = timm.create_model("resnet50", num_classes=0)
    return model
