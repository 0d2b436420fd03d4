"""`cascade`: a dispatcher, a router and experts, trained stage by stage."""

from .config import CascadeConfig
from .run import fit_cascade

__all__ = ["CascadeConfig", "fit_cascade"]
