"""`python -m benchmarks.kills`: 20 times `kill -9` at a random moment of the real command, then the same mask.

The moments are drawn over the whole life of a process: imports, decoding, steps, checkpoints, the report.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KILLS, STEPS = 20, 150
COMMAND = [sys.executable, "-m", "selfmask", "adapt"]
NEW = ["selfmask/fashion", "--backbone", "selfmask/tiny", "--steps", str(STEPS), "--batch-size", "16", "--out"]


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Begin the run, or continue it if it had got far enough to say what it is."""
    words = ["--resume"] if (folder / "config.json").exists() else NEW
    return subprocess.Popen([*COMMAND, *words, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def same_mask(one: Path, other: Path) -> bool:
    return (one / "mask.smn").read_bytes() == (other / "mask.smn").read_bytes()


def main() -> int:
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        whole, cut = Path(folder) / "whole", Path(folder) / "cut"
        begin = time.monotonic()
        assert start(whole).wait() == 0
        life = time.monotonic() - begin
        kills = 0
        while True:
            child = start(cut)
            if kills == KILLS:
                assert child.wait() == 0
                break
            try:
                child.wait(chance.uniform(0.1, 0.7) * life)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                kills += 1
                log = cut / "log.jsonl"
                done = len(log.read_text().splitlines()) * 10 if log.exists() else 0
                print(f"kill {kills}: {done} steps logged, mask written: {(cut / 'mask.smn').exists()}", flush=True)
                continue
            if not same_mask(cut, whole):  # it got through before its turn: begin another run, the count goes on
                break
            print("finished in between, mask bit-identical", flush=True)
            cut = Path(folder) / f"cut{kills}"
        same = same_mask(cut, whole)
    print(f"{KILLS} kills; mask bit-identical to the uninterrupted run's: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
