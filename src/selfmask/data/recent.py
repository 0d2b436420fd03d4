"""The last few things that were costly to get, for threads that ask for the same ones."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Keeps what was asked for last, up to so many bytes in all, and at least two things. Each is made only once.

    size: the bytes of one.
    """

    def __init__(self, limit: int, size: Callable[[T], int]) -> None:
        self._limit, self._size = limit, size
        self._begin()
        if hasattr(os, "register_at_fork"):  # in a new process nobody would finish what a thread had begun
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Future[T]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            found, mine = self._kept.get(key), False
            if found is None:
                found = self._kept[key] = Future()
                mine = True
            self._kept.move_to_end(key)
        if not mine:
            return found.result()
        try:
            found.set_result(make())
        except BaseException as error:
            with self._lock:
                self._kept.pop(key, None)
            found.set_exception(error)
            raise
        self._drop_oldest()
        return found.result()

    def _drop_oldest(self) -> None:
        with self._lock:
            done = {key: self._size(each.result()) for key, each in self._kept.items() if each.done()}
            total = sum(done.values())
            for key, size in list(done.items())[:-2]:
                if total <= self._limit:
                    break
                del self._kept[key]
                total -= size
