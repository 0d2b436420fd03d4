"""Masks on the Hugging Face hub. Only this file is light: who talks to the hub imports `hub.transfer`."""

from __future__ import annotations

import os
from typing import TypeGuard

PREFIX = "hf://"


def is_address(source: object) -> TypeGuard[str]:
    """Whether this names something on the hub; what lies on this machine under the same name comes first."""
    return isinstance(source, str) and source.startswith(PREFIX) and not os.path.exists(source)  # noqa: PTH110
