"""A base that is called by itself while a mask is active runs without it, which nobody would see: it is said, once."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import DirectCallWarning
from .locks import BaseLock

_meant = ContextVar("meant", default=False)


@contextmanager
def base_meant() -> Iterator[None]:
    """Within, whoever calls a base wants it as it is, without a mask."""
    before = _meant.set(True)
    try:
        yield
    finally:
        _meant.reset(before)


class Masked(Protocol):
    lock: BaseLock

    @property
    def active_mask(self) -> str | None: ...


def watch(masked: Masked, base: nn.Module, masked_names: Iterable[str]) -> None:
    """Hook the first module of the base that has masked weights, for as long as the masked model lives.

    That module runs in whatever method of the base is called, but not where no masked weight matters. What the hook
    costs a masked call, which holds the lock, is a look at the lock.
    """
    unwatch(base)  # what a copy of the base brought along
    hook = _Watch(masked)
    handle = _hooked(base, masked_names).register_forward_pre_hook(hook)
    weakref.finalize(masked, handle.remove).atexit = False


def unwatch(model: nn.Module) -> None:
    """Take the hooks of masked models that are no longer there, or that are of another base, from a copy of a base."""
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Watch) and hook.is_idle]:
            del hooks[key]


def _hooked(base: nn.Module, masked_names: Iterable[str]) -> nn.Module:
    modules = dict(base.named_modules(remove_duplicate=False))
    # Layers of this kind take another path, which rounds otherwise, where a module in them has a hook.
    apart = [f"{name}." for name, module in modules.items() if isinstance(module, nn.TransformerEncoderLayer)]
    owners = (name.rpartition(".")[0] for name in masked_names)
    return next((modules[name] for name in owners if name and not f"{name}.".startswith(tuple(apart))), base)


class _Watch:
    """A hook. Copies of it, with copies of the module it is on, do nothing."""

    def __init__(self, masked: Masked | None) -> None:
        self._masked = None if masked is None else weakref.ref(masked)
        self._said = False

    @property
    def is_idle(self) -> bool:
        return self._masked is None or self._masked() is None

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or self._said or self._masked is None:
            return
        masked = self._masked()
        if masked is None or masked.active_mask is None or masked.lock.is_held or _meant.get():
            return
        self._said = True
        warnings.warn(
            "the base was called directly: its weights are not masked there. Call the masked model instead: "
            'masked(x), masked.forward_features(x), masked.call("method", x); or hold masked.lock, if that is meant',
            DirectCallWarning,
            stacklevel=1,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watch:
        return _Watch(None)

    def __reduce__(self) -> Any:
        return {}.get.__reduce__()  # in a pickle, nothing of ours: a function that gives the inputs back
