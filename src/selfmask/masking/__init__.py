"""The method: scores, masks and the model that runs with them."""

from .config import MaskConfig
from .model import MaskedModel, get_masked_model

__all__ = ["MaskConfig", "MaskedModel", "get_masked_model"]
