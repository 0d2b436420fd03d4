"""What was asked for of late, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

_WINDOW = 4096  # times asked after which all of them count half


class Demand:
    """Counts that fade. Whoever uses it sees to it that one thread does so at a time."""

    def __init__(self) -> None:
        self._asked: Counter[object] = Counter()
        self._times = 0

    def notice(self, key: object) -> None:
        self._asked[key] += 1
        self._times += 1
        if self._times >= _WINDOW:
            self._times = 0
            self._asked = Counter({each: count // 2 for each, count in self._asked.items() if count > 1})

    def of(self, key: object) -> int:
        return self._asked[key]

    def forget(self, name: Callable[[object], bool]) -> None:
        for key in [key for key in self._asked if name(key)]:
            del self._asked[key]
