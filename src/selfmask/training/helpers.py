"""Processes that make batches ahead of the one that trains: deaf to signals, gone when it is done, named if killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from ..errors import RunError, SelfmaskError
from ..stopping import deaf_children

T = TypeVar("T")


@contextmanager
def made_ahead(loader: DataLoader[T]) -> Iterator[Iterator[T]]:
    """Within, the items of the loader; afterwards, none of its processes is left, whatever happened.

    If one of them was killed, that is the error, whatever else it led to: torch raises it amid anything, and what the
    process was about to send ends in errors of the connection.
    """
    with deaf_children():
        items: Any = iter(loader)
    helpers: list[BaseProcess] = getattr(items, "_workers", [])  # of one that has processes
    lost: list[BaseProcess] = []
    try:
        try:
            yield items
        finally:
            for _ in range(2):
                with suppress(RuntimeError):  # torch raises that one was killed here, too, but only once
                    _end(items, helpers, lost)
                    break
    except SelfmaskError:
        raise
    except Exception as error:
        if not lost:
            raise
        raise RunError(
            "a process that prepares views was killed",
            found=", ".join(f"process {helper.pid} ended {_how(helper.exitcode)}" for helper in lost),
            todo="continue with --resume; if memory ran out, with fewer --workers, or 0",
        ) from error


def _end(items: Any, helpers: list[BaseProcess], lost: list[BaseProcess]) -> None:
    """Have torch end them, and make sure. `lost` gets those that had ended by themselves, or were killed.

    They are deaf to the signal that torch, and Python when it exits, would end one with that does not answer, and
    Python would wait for it forever: what a killed process held is never set free.
    """
    if helpers:
        items._shutdown_workers()
    lost += [helper for helper in helpers if helper.exitcode]
    for helper in helpers:
        helper.kill()
    for helper in helpers:
        helper.join()


def _how(code: int | None) -> str:
    with suppress(ValueError, TypeError):
        return f"by {signal.Signals(-(code or 0)).name}"
    return f"with exit code {code}"
