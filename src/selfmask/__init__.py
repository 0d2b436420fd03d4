"""Adapt a frozen vision backbone by learning which of its weights to switch off."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adaptation import AdaptResult, adapt
    from .cascade import Cascade, CascadeConfig
    from .masking import MaskConfig, MaskedModel, get_masked_model
    from .memory import memory_kept
    from .presets import AdaptConfig
    from .supervised import TrainConfig, TrainResult, open_labelled, train

__version__ = "0.1.0"
__all__ = [
    "AdaptConfig",
    "AdaptResult",
    "Cascade",
    "CascadeConfig",
    "MaskConfig",
    "MaskedModel",
    "TrainConfig",
    "TrainResult",
    "adapt",
    "get_masked_model",
    "memory_kept",
    "open_labelled",
    "train",
]

_HOME = {
    **{"AdaptConfig": "presets", "AdaptResult": "adaptation", "adapt": "adaptation"},
    **dict.fromkeys(("Cascade", "CascadeConfig"), "cascade"),
    **dict.fromkeys(("MaskConfig", "MaskedModel", "get_masked_model"), "masking"),
    "memory_kept": "memory",
    **dict.fromkeys(("TrainConfig", "TrainResult", "open_labelled", "train"), "supervised"),
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: torch and its kin take seconds, and `selfmask --help` needs none of them."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
