"""What there is to ask for, and what its files say of themselves: headers alone are read, and read once."""

from __future__ import annotations

import threading
from collections import OrderedDict

from ..backbones import Backbone
from ..shelf import About, Found, read_about
from .shelf import FROZEN, Shelf

_MOST = 10_000  # headers that are remembered


class Catalogue:
    """The models of a shelf."""

    def __init__(self, shelf: Shelf, backbone: Backbone) -> None:
        self._shelf = shelf
        self.frozen = About(FROZEN, "backbone", base=backbone.name)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Found, About]] = OrderedDict()

    def all(self) -> list[About]:
        found = (self.of(name) for name in self._shelf.names())
        return [self.frozen, *(each for each in found if each is not None)]

    def of(self, name: str) -> About | None:
        """What the file of a name says; None if there is none."""
        if (found := self._shelf.find(name)) is None:
            return None
        with self._lock:
            known = self._known.get(name)
            if known is not None and known[0] == found:
                self._known.move_to_end(name)
                return known[1]
        about = read_about(name, found)
        with self._lock:
            self._known[name] = found, about
            self._known.move_to_end(name)
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        return about
