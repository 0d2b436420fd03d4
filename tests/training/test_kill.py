"""`kill -9` at any moment, then resume: the mask comes out the same to the bit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from selfmask import adapt

from .small import HOW, Clothes, config, network

ROOT = Path(__file__).parents[2]
STEPS, KILLS = 150, 3

WORKER = f"""
import sys
from pathlib import Path
from selfmask import adapt
from tests.training.small import HOW, Clothes, config, network
changes = dict(steps={STEPS}, checkpoint_every=7)
adapt(network(dropout=0.1), Clothes(), config(**changes), out=Path(sys.argv[1]), resume=True, preprocessing=HOW)
"""


def lines(folder: Path) -> int:
    file = folder / "log.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_killed_at_random_and_resumed_it_ends_in_the_same_mask(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    changes = {"steps": STEPS, "checkpoint_every": 7}
    adapt(network(dropout=0.1), Clothes(), config(**changes), out=whole, preprocessing=HOW)

    cut, chance, kills = tmp_path / "cut", random.Random(0), 0
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for _ in range(KILLS + 1):
        target = lines(cut) + chance.randint(1, STEPS // KILLS)
        child = subprocess.Popen([sys.executable, "-c", WORKER, str(cut)], env=env)
        if kills < KILLS:
            while child.poll() is None and lines(cut) < target:
                time.sleep(0.001)
            child.kill()
            kills += child.wait() != 0
        else:
            assert child.wait() == 0
    assert kills == KILLS
    assert not list(cut.glob("**/*.tmp"))
    assert [json.loads(line)["step"] for line in (cut / "log.jsonl").read_text().splitlines()] == [*range(1, STEPS + 1)]
    assert (cut / "mask.smn").read_bytes() == (whole / "mask.smn").read_bytes()
