"""Methods side by side, on the same images, labels and seeds."""

from .grid import Cell, CompareConfig, Comparison, compare

__all__ = ["Cell", "CompareConfig", "Comparison", "compare"]
