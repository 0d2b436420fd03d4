"""Ctrl-C and a polite kill: whoever trains finishes the step and saves, and helper processes do not hear of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ONE_WISH = 1.0  # seconds: a terminal, a launcher and a parent may each pass on the same wish
_SAID = b"finishing this step, then saving; once more stops at once\n"


@contextmanager
def stop_flag() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C and a polite kill only raise a flag, so that a step is finished and saved. A later one ends."""
    raised = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield raised.is_set
        return
    first: list[float] = []

    def handle(number: int, _: object) -> None:
        # It may come in the middle of anything, a print included, and must not raise: nothing would be saved.
        if not first:
            first.append(time.monotonic())
            raised.set()
            _say(_SAID)
        elif time.monotonic() - first[0] > _ONE_WISH:
            signal.signal(number, previous[number])
            os.kill(os.getpid(), number)

    previous: dict[int, Any] = {}
    try:
        for number in _SIGNALS:
            # None: it was set by something other than Python, and cannot be set again.
            previous[number] = signal.signal(number, handle) or signal.SIG_DFL
        yield raised.is_set
    finally:
        for caught, handler in previous.items():
            signal.signal(caught, handler)


def _say(words: bytes) -> None:
    """On stderr, past its buffer, which may be in use just now; if it is closed, nowhere."""
    with suppress(OSError, ValueError, AttributeError):  # AttributeError: there is none
        os.write(sys.stderr.fileno(), words)


@contextmanager
def deaf_children(*signals: signal.Signals) -> Iterator[None]:
    """Processes started within never hear these signals, by default Ctrl-C and a polite kill, which reach whole groups.

    The one that started them decides what becomes of it; they end when it says so, or is gone.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    # What is blocked stays blocked in a new process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals or _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_deaf(process: BaseProcess, *signals: signal.Signals) -> None:
    """Start a process of `multiprocessing` that does not hear these signals from its first moment on."""
    if os.name == "posix":
        # Before, not on the way: it is started with the first process, and lets all signals through again.
        resource_tracker.ensure_running()
    with deaf_children(*signals):
        process.start()
