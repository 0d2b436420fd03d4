"""Faults at random moments of real runs (`python -m benchmarks.faults`), in a small share of what the docs show."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from .conftest import ROOT


def counted(*words: str) -> Counter[str]:
    command = [sys.executable, "-m", "benchmarks.faults", "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Counter(json.loads(done.stdout))


def nothing_lost(count: Counter[str], faults: int) -> None:
    assert (count["tried"], count["equal"]) == (faults, faults)
    assert (count["lost"], count["tracebacks"], count["left behind"]) == (0, 0, 0)
    assert count["stopped"]  # not all of them missed


@pytest.mark.skipif(sys.platform != "linux", reason="signals, disks and permissions of Linux")
def test_files_of_vectors() -> None:
    nothing_lost(counted("--commands", "embed", "--faults", "8"), 8)


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="signals, disks and permissions of Linux")
def test_every_command() -> None:
    nothing_lost(counted("--faults", "28", "--seed", "7"), 28)
