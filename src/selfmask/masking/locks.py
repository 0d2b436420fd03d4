"""Locks of bases: who runs a base with other tensors in place changes it for as long as that takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from torch import nn

Method = TypeVar("Method", bound=Callable[..., Any])

_registering = threading.Lock()
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


class BaseLock:
    """Held by one thread at a time, which may take it again; the same for all masked models that share modules.

    It belongs to the modules of a base, not to a masked model: there may be several of these on one base.
    """

    def __init__(self, base: nn.Module) -> None:
        with _registering:
            new = threading.RLock()
            # Modules without tensors are left out: one activation may serve models that have nothing else in common.
            own = (module for module in base.modules() if module is base or module._parameters or module._buffers)
            found = {_locks.setdefault(module, new) for module in own}
        self._parts = sorted(found, key=id)  # in one order for all, so that no two wait for each other

    def __enter__(self) -> None:
        for part in self._parts:
            part.acquire()

    @property
    def is_held(self) -> bool:
        """Whether this thread holds it."""
        return bool(self._parts[0]._is_owned())  # type: ignore[attr-defined]  # as threading.Condition asks

    def __exit__(self, *_: object) -> None:
        for part in reversed(self._parts):
            part.release()


def exclusive(method: Method) -> Method:
    """A method that runs while its object holds its `lock`."""

    @wraps(method)
    def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast("Method", run)
