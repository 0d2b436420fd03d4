"""Settings: dataclasses out of plain values, files and options, with strict types and help from their docstrings."""

from .fields import (
    KIND,
    Path,
    Tree,
    Where,
    choices_of,
    field_help,
    hints_of,
    kinds_of,
    leaves,
    merged,
    part_of,
    to_dict,
    typed,
)

__all__ = [
    "KIND",
    "Path",
    "Tree",
    "Where",
    "choices_of",
    "field_help",
    "hints_of",
    "kinds_of",
    "leaves",
    "merged",
    "part_of",
    "to_dict",
    "typed",
]
