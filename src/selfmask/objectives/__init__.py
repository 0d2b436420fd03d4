"""Objectives: what is learned. Each is a loss with trainable heads of its own, in a file of its own."""

from .base import Objective
from .contrast import Contrast, ContrastConfig
from .swav import SwAV, SwAVConfig

__all__ = ["Contrast", "ContrastConfig", "Objective", "SwAV", "SwAVConfig"]
