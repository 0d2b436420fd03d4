"""Objectives: what is learned. Each is a loss with trainable heads of its own, in a file of its own."""

from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules

from .base import OBJECTIVES, Context, Health, Objective, ObjectiveConfig, objective_named, register

# Every file of this folder registers what it defines; so do other packages, by an entry point of this group.
for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
for _point in entry_points(group="selfmask.objectives"):
    _point.load()

__all__ = ["OBJECTIVES", "Context", "Health", "Objective", "ObjectiveConfig", "objective_named", "register"]
