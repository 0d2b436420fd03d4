"""`kill -9` at any moment, then resume: the mask comes out the same to the bit."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

from selfmask import adapt

from ..processes import PROCESSES
from .small import HOW, Clothes, config, network

STEPS, KILLS = 60, 3


def run(out: Path) -> None:
    settings = config(steps=STEPS, checkpoint_every=7)
    adapt(network(dropout=0.1), Clothes(), settings, out=out, resume=True, preprocessing=HOW, report=False)


def lines(folder: Path) -> int:
    file = folder / "log.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_killed_at_random_and_resumed_it_ends_in_the_same_mask(tmp_path: Path) -> None:
    whole, cut, chance = tmp_path / "whole", tmp_path / "cut", random.Random(0)
    run(whole)
    for _ in range(KILLS):
        target = lines(cut) + chance.randint(1, STEPS // (KILLS + 1))
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
