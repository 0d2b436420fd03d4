"""Name -> frozen network and the preprocessing it was trained with."""

from .listing import BackboneInfo, list_backbones, names
from .loading import Backbone, load_backbone
from .tiny import TinyResNet

__all__ = ["Backbone", "BackboneInfo", "TinyResNet", "list_backbones", "load_backbone", "names"]
