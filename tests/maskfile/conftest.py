"""What most tests of the mask file start from."""

from __future__ import annotations

import pytest

from .tiny import Tiny


@pytest.fixture
def base() -> Tiny:
    """A fresh tiny base, always with the same weights."""
    return Tiny()
