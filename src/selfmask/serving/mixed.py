"""Passes that images of different masks share (`masking/mixing.py`), and what is kept of masks in demand for them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..embedding.vectors import run_batch
from ..masking.corrections import Corrections
from ..masking.mixed_view import MixedView
from ..masking.mixing import Mixing
from ..masking.switching import Switch
from ..preprocessing import Preprocessing
from .demand import Demand


class Share(NamedTuple):
    """So many images of a pass, one after the other, that are of one mask."""

    key: object
    switch: Switch
    images: int


class MixedPasses:
    """Runs images of several masks at once. Corrections of at most `room` bytes are kept: the least recently used make
    way, but only to a mask that was asked for more often of late. The others are made anew for each pass."""

    def __init__(self, mixing: Mixing, room: int, count: Callable[[str], None] = lambda what: None) -> None:
        """count: told of every "hit" and "miss"."""
        self._mixing, self._room, self._count = mixing, room, count
        self._own = threading.local()
        self._lock = threading.Lock()
        self._kept: OrderedDict[object, Corrections] = OrderedDict()
        self._demand = Demand()
        self.nbytes = 0

    def takes(self, switch: Switch) -> bool:
        """Whether images of this mask may share a pass."""
        return self._mixing.takes(switch)

    def vectors(self, shares: Sequence[Share], images: Tensor, preprocessing: Preprocessing) -> Tensor:
        view: MixedView | None = getattr(self._own, "view", None)
        if view is None:
            view = self._own.view = self._mixing.view()
        view.put([(self._corrections(share), share.images) for share in shares])
        try:
            return run_batch(view.module, images, preprocessing)
        finally:
            view.clear()

    def forget(self, name: Callable[[object], bool]) -> None:
        """These masks will not be asked for again."""
        with self._lock:
            for key in [key for key in self._kept if name(key)]:
                self.nbytes -= self._kept.pop(key).nbytes
            self._demand.forget(name)

    def _corrections(self, share: Share) -> Corrections:
        with self._lock:
            self._demand.notice(share.key)
            found = self._kept.get(share.key)
            if found is not None:
                self._kept.move_to_end(share.key)
                self._count("hit")
                return found
        self._count("miss")
        made = self._mixing.corrections(share.switch)
        with self._lock:
            self._keep(share.key, made)
        return made

    def _keep(self, key: object, made: Corrections) -> None:
        """If there is room, or can be made."""
        if key in self._kept:  # by another thread, meanwhile
            return
        leaving, freed = list[object](), self._room - self.nbytes
        for old, each in self._kept.items():  # from the least recently used on
            if freed >= made.nbytes:
                break
            if self._demand.of(key) <= self._demand.of(old):
                return
            leaving.append(old)
            freed += each.nbytes
        if freed < made.nbytes:
            return
        for old in leaving:
            self.nbytes -= self._kept.pop(old).nbytes
        self._kept[key] = made
        self.nbytes += made.nbytes
