"""Name -> frozen network and the preprocessing it was trained with."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .listing import BackboneInfo, list_backbones, names
    from .loading import Backbone, load_backbone
    from .tiny import TinyResNet

_HOME = {
    "Backbone": "loading",
    "BackboneInfo": "listing",
    "TinyResNet": "tiny",
    "list_backbones": "listing",
    "load_backbone": "loading",
    "names": "listing",
}
__all__ = ["Backbone", "BackboneInfo", "TinyResNet", "list_backbones", "load_backbone", "names"]


def __getattr__(name: str) -> Any:
    """Imported when first asked for: timm takes its time, and who only runs a backbone needs none of it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
