from __future__ import annotations

import pytest

from selfmask import MaskedModel

from .digits import get_perturbed, masked_digits


@pytest.fixture
def masked() -> MaskedModel:
    """In eval mode, where every call is the same function of its input."""
    masked = masked_digits().eval()
    masked.base[1].running_mean.normal_()
    return get_perturbed(masked.base)
