"""Expanded weights: a bounded number of views that run, the ones in demand kept, the others exchanged in place."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from torch import nn

from ..masking.switching import SpareView, Switch
from .demand import Demand


class HotViews:
    """At most `room` views. One belongs to each thread, for masks that come and go; the others stay with masks. Where
    views can be passing (`masking/switching.py`), those of the threads hold no weights, and count as one.

    Of the others, the least recently used makes way, but only to a mask that was asked for more often of late: under
    mixed traffic, rare masks would otherwise push out the frequent ones that they come between.
    """

    def __init__(
        self,
        base: nn.Module,
        room: int,
        threads: int,
        count: Callable[[str], None] = lambda what: None,
        *,
        passing: bool = False,
    ) -> None:
        """count: told of every "hit", and of every "switch". passing: whether views can be."""
        self._base, self._room, self._count = base, room - (1 if passing else threads), count
        self._passing = passing
        self._lock = threading.Lock()
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self._demand = Demand()
        self._pinned: set[Hashable] = set()
        self._own = threading.local()

    def pin(self, key: Hashable) -> None:
        """Keep this mask, once it is there."""
        with self._lock:
            self._pinned.add(key)

    def forget(self, name: Callable[[object], bool]) -> None:
        """Masks that will not be asked for again make way first."""
        with self._lock:
            for key in [key for key in self._slots if name(key)]:
                self._slots.move_to_end(key, last=False)
            self._demand.forget(name)
            self._pinned = {key for key in self._pinned if not name(key)}

    @contextmanager
    def lease(self, key: Hashable, switch: Switch) -> Iterator[nn.Module]:
        """A module with this mask in place, for as long as it is used. Threads may use one module together."""
        slot = self._found(key)
        if slot is None:
            yield self._exchanged(key, switch)
            return
        try:
            if not slot.filled.is_set():  # only who has just taken it comes here
                self._count("switch")
                slot.view.put(switch)
                slot.filled.set()
            else:
                self._count("hit")
            yield slot.view.module
        finally:
            with self._lock:
                slot.users -= 1
                if not slot.filled.is_set() and self._slots.get(key) is slot:  # it could not be put in place
                    del self._slots[key]

    def _found(self, key: Hashable) -> _Slot | None:
        """A slot that holds this mask, or that it may take."""
        with self._lock:
            self._demand.notice(key)
            slot = self._slots.get(key)
            if slot is not None:
                if not slot.filled.is_set():  # another thread is about it; waiting takes as long as doing it
                    return None
                self._slots.move_to_end(key)
                slot.users += 1
                return slot
            slot = self._free(key)
            if slot is not None:
                self._slots[key] = slot
            return slot

    def _free(self, key: Hashable) -> _Slot | None:
        if len(self._slots) < self._room:
            return _Slot(SpareView(self._base))
        for old, slot in self._slots.items():  # from the least recently used on
            if slot.users == 0 and old not in self._pinned:
                if key not in self._pinned and self._demand.of(key) <= self._demand.of(old):
                    return None
                del self._slots[old]
                return _Slot(slot.view)
        return None

    def _exchanged(self, key: Hashable, switch: Switch) -> nn.Module:
        """This thread's own view."""
        own: _Own | None = getattr(self._own, "view", None)
        if own is None:
            own = self._own.view = _Own(SpareView(self._base, passing=self._passing))
        if own.key == key:
            self._count("hit")
        else:
            self._count("switch")
            own.key = None  # in case it ends half-way
            own.view.put(switch)
            own.key = key
        return own.view.module


class _Slot:
    """A view that stays with a mask; `users` run it or are about to fill it."""

    def __init__(self, view: SpareView) -> None:
        self.view, self.users, self.filled = view, 1, threading.Event()


class _Own:
    def __init__(self, view: SpareView) -> None:
        self.view = view
        self.key: Hashable = None
