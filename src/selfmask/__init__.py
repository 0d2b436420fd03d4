"""Adapt a frozen vision backbone by learning which of its weights to switch off."""

from .masking import MaskConfig, MaskedModel, get_masked_model

__version__ = "0.1.0"
__all__ = ["MaskConfig", "MaskedModel", "get_masked_model"]
