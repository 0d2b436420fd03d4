"""A folder as timm writes it for the hub: `timm.create_model("local-dir:FOLDER", pretrained=True)` loads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import safetensors.torch
import timm
from torch import nn

from ..errors import ExportError
from ..preprocessing import Preprocessing

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_KEPT = ("pool_size", "first_conv", "classifier", "fixed_input_size", "license", "origin_url", "paper_ids")


def timm_files(model: nn.Module, name: str, preprocessing: Preprocessing, about: Mapping[str, str]) -> dict[str, bytes]:
    """Config and weights of a network of timm, with the preprocessing that the mask was learned under."""
    known = _known(name)
    if known is None:
        raise ExportError(
            f"timm has no network called {name or 'nothing'}",
            expected="a backbone of timm",
            todo="use --format onnx, pt2 or safetensors",
        )
    kept = {key: value for key, value in dataclasses.asdict(known).items() if key in _KEPT and value is not None}
    config = {
        "architecture": known.architecture,
        "num_classes": 0,
        "num_features": getattr(model, "num_features", None),
        "model_args": _arguments(model),
        "pretrained_cfg": {
            **kept,
            "tag": "selfmask",
            "custom_load": False,
            "input_size": [3, *preprocessing.size],
            "interpolation": preprocessing.interpolation,
            # Resized so that it just covers the size, then the middle: there is no border to cut off.
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
            "num_classes": 0,
        },
        "selfmask": dict(about),
    }
    tensors = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    return {
        CONFIG: json.dumps(config, indent=2).encode(),
        WEIGHTS: safetensors.torch.save(tensors, {"format": "pt", **about}),
    }


def _known(name: str) -> timm.models.PretrainedCfg | None:
    if "#" in name or name.startswith(("selfmask/", "open_clip/", "transformers/")):
        return None
    try:
        return timm.get_pretrained_cfg(name.removeprefix("timm/").removeprefix("dino/").removeprefix("swav/"))
    except RuntimeError:
        return None


def _arguments(model: nn.Module) -> dict[str, object]:
    """What timm must be told to build the same network: ours take images of any size, where that is a choice."""
    dynamic = getattr(getattr(model, "patch_embed", None), "dynamic_img_size", False) is True
    return {"dynamic_img_size": True} if dynamic else {}
