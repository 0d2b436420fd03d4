"""Objectives: what is learned. Each is a loss with trainable heads of its own, in a file of its own."""

from .base import Objective
from .swav import SwAV, SwAVConfig

__all__ = ["Objective", "SwAV", "SwAVConfig"]
