"""What compilers and exporters see of a masked model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import ExportError
from .calls import call_with

_TODO = "export the base with the mask in place: torch.export.export(masked.view(), ...)"


class Originals:
    """The tensors that a module had when it was last asked for its modules.

    `torch.export` asks for them, to learn which tensors there are, and then traces the module with placeholders in
    place of all of them. What is to be computed from values now, and not by the program, needs the originals.
    """

    def __init__(self) -> None:
        self._found: dict[str, weakref.ref[Tensor]] = {}

    def note(self, module: nn.Module) -> None:
        """Take down which tensors are in place."""
        self._found = {
            f"{prefix}.{name}" if prefix else name: weakref.ref(tensor)
            for prefix, part in nn.Module.named_modules(module, remove_duplicate=False)
            for name, tensor in (*part._parameters.items(), *part._buffers.items())
            if tensor is not None
        }

    def call(self, module: nn.Module, method: str, *args: Any) -> Any:
        """A method of the module with its originals in place; in another thread, because tracers watch this one."""
        found = {name: tensor for name, each in self._found.items() if (tensor := each()) is not None}
        if not found or len(found) < len(self._found):
            raise ExportError("the weights of this masked model cannot be told while it is exported", todo=_TODO)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call_with, found, module, method, args).result()


def keep_from_compiler(masked: Any) -> None:
    """In the class of masked models, what decides which tensors the base gets is not compiled; the base is.

    Exporters take these tensors as they are now: they become constants of the program.
    """
    for name, strict in (("forward", _strict_forward), ("call", _strict_call)):
        setattr(masked, name, _by_tracer(getattr(masked, name), strict))
    masked._replacements = torch.compiler.disable(masked._replacements)  # type: ignore[no-untyped-call]
    for constant in (_names, _tensor):
        torch.compiler.assume_constant_result(constant)  # type: ignore[no-untyped-call]


def _by_tracer(method: Callable[..., Any], strict: Callable[..., Any]) -> Callable[..., Any]:
    """A method that `torch.compile` leaves alone and `torch.export` runs, or if it reads code, reads the other one."""
    kept = torch.compiler.disable(method, recursive=False)  # type: ignore[no-untyped-call]

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_exporting():
            return kept(*args, **kwargs)
        return (strict if torch.compiler.is_dynamo_compiling() else method)(*args, **kwargs)

    return run


def _strict_forward(masked: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = {name: _tensor(masked, name) for name in _names(masked)}
    return functional_call(masked.base, tensors, args, kwargs, tie_weights=False)


def _strict_call(masked: Any, method: str, /, *args: Any, **kwargs: Any) -> Any:
    tensors = {name: _tensor(masked, name) for name in _names(masked)}
    return call_with(tensors, masked.base, method, args, kwargs)


def _names(masked: Any) -> tuple[str, ...]:
    """Of the tensors that the base gets. This and the next are run, not read, and what they give is constant."""
    if masked.training:
        raise ExportError(
            "a masked model in train mode cannot be exported strictly", todo="use strict=False, or eval()"
        )
    with masked.lock:
        _finished[masked] = masked._replacements()
    return tuple(_finished[masked])


def _tensor(masked: Any, name: str) -> Tensor:
    return _finished[masked].pop(name).clone()


_finished: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()
