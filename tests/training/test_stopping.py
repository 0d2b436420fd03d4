"""Ctrl-C and a polite kill: told once, whatever becomes of the terminal, and not to helper processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from selfmask.training import stopping
from selfmask.training.stopping import deaf_children, stop_flag


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
