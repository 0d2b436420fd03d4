"""Faults at random moments of real runs (`python -m benchmarks.faults`), in a small share of what the docs show."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from .conftest import ROOT


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="signals, disks and permissions of Linux")
@pytest.mark.parametrize(("commands", "faults"), [("embed", 16), ("adapt,train,cascade", 20)])
def test_nothing_is_lost(commands: str, faults: int) -> None:
    words = ["--json", "--commands", commands, "--faults", str(faults), "--seed", "1"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.faults", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count = Counter(json.loads(done.stdout))
    assert (count["tried"], count["equal"]) == (faults, faults)
    assert (count["lost"], count["tracebacks"], count["left behind"]) == (0, 0, 0)
    assert count["stopped"]  # not all of them missed
