"""Passes that images of different masks share (`masking/mixing.py`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..embedding.vectors import run_batch
from ..masking.mixing import Mixing
from ..masking.switching import Switch
from ..preprocessing import Preprocessing

if TYPE_CHECKING:
    from ..masking.mixed_view import MixedView


class Share(NamedTuple):
    """So many images of a pass, one after the other, that are of one mask."""

    switch: Switch
    images: int


class MixedPasses:
    """Runs images of several masks at once. Nothing is kept of them."""

    def __init__(self, mixing: Mixing) -> None:
        self._mixing, self._own = mixing, threading.local()

    def takes(self, switch: Switch, size: tuple[int, int]) -> bool:
        """Whether images of this mask, of this size, may share a pass: others were not tried."""
        return size == self._mixing.size and self._mixing.takes(switch)

    def vectors(self, shares: Sequence[Share], images: Tensor, preprocessing: Preprocessing) -> Tensor:
        view: MixedView | None = getattr(self._own, "view", None)
        if view is None:
            view = self._own.view = self._mixing.view()
        view.put([(self._mixing.own(share.switch), share.images) for share in shares])
        try:
            return run_batch(view.module, images, preprocessing)
        finally:
            view.clear()
