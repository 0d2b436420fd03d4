"""Ctrl-C and a polite kill: told once, whatever becomes of the terminal, and not to helper processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import pytest

from selfmask import stopping
from selfmask.stopping import deaf_children, start_deaf, stop_flag


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stderr", ["a closed pipe", "none", "without a file", "closed"])
def test_the_flag_is_raised_whatever_becomes_of_stderr(
    number: int, stderr: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = closed_pipe()
    streams = {
        "a closed pipe": SimpleNamespace(fileno=lambda: pipe),
        "none": None,
        "without a file": SimpleNamespace(),
        "closed": SimpleNamespace(fileno=lambda: 10_000),
    }
    monkeypatch.setattr(sys, "stderr", streams[stderr])
    with stop_flag() as asked_to_stop:
        assert not asked_to_stop()
        os.kill(os.getpid(), number)
        assert asked_to_stop()
    os.close(pipe)


def test_it_is_told_past_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal may come in the middle of a print."""
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(fileno=lambda: writing))
    with stop_flag():
        os.kill(os.getpid(), signal.SIGTERM)
    os.close(writing)
    assert b"finishing this step" in os.read(reading, 1000)
    os.close(reading)


def test_the_same_wish_passed_on_twice_is_one_and_a_later_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun, or the parent of an expert, passes a signal on that the whole group has got."""
    with stop_flag() as asked_to_stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        assert asked_to_stop()
        monkeypatch.setattr(stopping, "_ONE_WISH", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_children_do_not_hear_and_the_parent_does() -> None:
    with stop_flag() as asked_to_stop:
        with deaf_children():
            deaf = subprocess.Popen(["sleep", "60"])
            os.kill(os.getpid(), signal.SIGTERM)
        hearing = subprocess.Popen(["sleep", "60"])
        assert asked_to_stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        deaf.send_signal(number)
    hearing.terminate()
    assert hearing.wait(10) == -signal.SIGTERM
    time.sleep(0.05)
    assert deaf.poll() is None
    deaf.kill()
    deaf.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="signals as Linux tells of them")
def test_the_first_process_that_is_started_anew_does_not_hear_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first, `multiprocessing` starts another one of its own, and unblocks signals on the way."""
    monkeypatch.setattr(resource_tracker, "_resource_tracker", tracker := resource_tracker.ResourceTracker())
    for name in ("ensure_running", "getfd"):
        monkeypatch.setattr(resource_tracker, name, getattr(tracker, name))
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    start_deaf(process, signal.SIGINT)
    status = Path(f"/proc/{process.pid}/status").read_text()
    process.kill()
    process.join()
    tracker._stop()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    assert blocked & 1 << (signal.SIGINT - 1)
    assert not blocked & 1 << (signal.SIGTERM - 1)
