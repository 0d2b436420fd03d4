"""Name -> frozen network and the preprocessing it was trained with."""

from .facts import base_facts
from .listing import BackboneInfo, list_backbones, names
from .loading import Backbone, at_hand, load_backbone
from .tiny import TinyResNet

__all__ = [
    "Backbone",
    "BackboneInfo",
    "TinyResNet",
    "at_hand",
    "base_facts",
    "list_backbones",
    "load_backbone",
    "names",
]
