"""`kill -9`, or a signal to the whole group, at any moment, then resume: the mask comes out the same to the bit."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from selfmask import adapt
from selfmask.errors import InterruptedRunError, RunError
from selfmask.training.display import QuietDisplay

from ..processes import PROCESSES
from .small import HOW, Clothes, config, network

STEPS = 60


def run(out: Path, workers: int = 0) -> None:
    settings = config(steps=STEPS, checkpoint_every=7, workers=workers)
    adapt(network(dropout=0.1), Clothes(), settings, out=out, resume=True, preprocessing=HOW, report=False)


def lines(folder: Path) -> int:
    file = folder / "log.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.heavy
@pytest.mark.parametrize("kills", [1, 3])
def test_killed_at_random_and_resumed_it_ends_in_the_same_mask(tmp_path: Path, kills: int) -> None:
    whole, cut, chance = tmp_path / "whole", tmp_path / "cut", random.Random(0)
    run(whole)
    for _ in range(kills):
        target = lines(cut) + chance.randint(1, STEPS // (kills + 1))
        child = PROCESSES.Process(target=run, args=(cut,))
        child.start()
        while child.is_alive() and lines(cut) < target:
            time.sleep(0.002)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    run(cut)
    assert not list(cut.glob("**/*.tmp"))
    assert [json.loads(line)["step"] for line in (cut / "log.jsonl").read_text().splitlines()] == [*range(1, STEPS + 1)]
    assert (cut / "mask.smn").read_bytes() == (whole / "mask.smn").read_bytes()


def as_a_command() -> None:
    """As a scheduler or a terminal would start it: helpers are its own children, with it in a group of their own."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # else they would come from a server, as this process did


def run_in_a_group(out: Path) -> None:
    as_a_command()
    try:
        run(out, workers=2)
    except InterruptedRunError:
        sys.exit(130)


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_ends_with_a_checkpoint(tmp_path: Path, number: int) -> None:
    """Processes that prepare views get it, too."""
    child = PROCESSES.Process(target=run_in_a_group, args=(tmp_path / "cut",))
    child.start()
    while child.is_alive() and lines(tmp_path / "cut") < 10:
        time.sleep(0.002)
    assert child.pid is not None
    os.killpg(child.pid, number)
    child.join()
    assert child.exitcode == 130
    step = torch.load(tmp_path / "cut/checkpoints/last.pt", weights_only=True)["step"]
    assert step == lines(tmp_path / "cut") >= 10
    run(tmp_path / "cut", workers=2)
    run(tmp_path / "whole")
    assert (tmp_path / "cut/mask.smn").read_bytes() == (tmp_path / "whole/mask.smn").read_bytes()


class Killer(QuietDisplay):
    """Kills one of the processes that prepare views, as the system does when memory runs out."""

    def line(self, line: Mapping[str, Any]) -> None:
        if line["step"] == 10:
            multiprocessing.active_children()[0].kill()


def run_and_lose_a_helper(out: Path) -> None:
    as_a_command()
    settings = config(steps=STEPS, checkpoint_every=7, workers=2)
    try:
        adapt(network(), Clothes(), settings, out=out, preprocessing=HOW, report=False, display=Killer())
    except RunError as error:
        (out / "error").write_text(str(error))
        sys.kept = error  # type: ignore[attr-defined]  # with all that its traceback holds, until Python has ended


@pytest.mark.heavy
def test_a_killed_helper_is_named_and_nothing_waits_for_the_others(tmp_path: Path) -> None:
    """In a process of its own: torch raises it amid anything, and Python waits for helpers when it ends."""
    child = PROCESSES.Process(target=run_and_lose_a_helper, args=(tmp_path / "cut",))
    child.start()
    assert child.pid is not None
    try:
        child.join(30)
        assert child.exitcode == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(child.pid, 0)  # nobody is left
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    words = (tmp_path / "cut/error").read_text()
    assert "was killed" in words
    assert "SIGKILL" in words
    assert "--resume" in words
    assert torch.load(tmp_path / "cut/checkpoints/last.pt", weights_only=True)["step"] in (7, 14)
