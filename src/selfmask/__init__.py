"""Adapt a frozen vision backbone by learning which of its weights to switch off."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cascade.model import Cascade
    from .commands.adapt import AdaptResult, adapt
    from .commands.adapt_config import AdaptConfig
    from .commands.cascade.config import CascadeConfig
    from .commands.cascade.run import fit_cascade
    from .commands.train import TrainConfig, TrainResult, train
    from .data.partition import open_labelled
    from .evaluation.feature_map import FeatureMap
    from .masking import MaskConfig, MaskedModel, get_masked_model

__version__ = "0.1.0"

_HOME = {
    "AdaptConfig": "commands.adapt_config",
    "AdaptResult": "commands.adapt",
    "Cascade": "cascade.model",
    "CascadeConfig": "commands.cascade.config",
    "FeatureMap": "evaluation.feature_map",
    "MaskConfig": "masking",
    "MaskedModel": "masking",
    "TrainConfig": "commands.train",
    "TrainResult": "commands.train",
    "adapt": "commands.adapt",
    "fit_cascade": "commands.cascade.run",
    "get_masked_model": "masking",
    "open_labelled": "data.partition",
    "train": "commands.train",
}
__all__ = [
    "AdaptConfig",
    "AdaptResult",
    "Cascade",
    "CascadeConfig",
    "FeatureMap",
    "MaskConfig",
    "MaskedModel",
    "TrainConfig",
    "TrainResult",
    "adapt",
    "fit_cascade",
    "get_masked_model",
    "open_labelled",
    "train",
]


def __getattr__(name: str) -> Any:
    """Imported when first asked for: torch and its kin take seconds, and `selfmask --help` needs none of them."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
