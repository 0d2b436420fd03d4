"""Folders of masks: which names there are, in which files, and what these say of themselves."""

from .about import About, read_about
from .folder import ENDING, Found, MaskFolder, Stamp, stamp_of

__all__ = ["ENDING", "About", "Found", "MaskFolder", "Stamp", "read_about", "stamp_of"]
