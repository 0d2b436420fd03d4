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
COMMAND = [
    *(sys.executable, "-m", "selfmask", "adapt", "selfmask/fashion", "--backbone", "selfmask/tiny"),
    *("--steps", str(STEPS), "--batch-size", "16", "--resume", "--out"),
]


def start(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*COMMAND, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> int:
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        whole, cut = Path(folder) / "whole", Path(folder) / "cut"
        begin = time.monotonic()
        assert start(whole).wait() == 0
        life = time.monotonic() - begin
        kills = []
        while True:
            child = start(cut)
            if len(kills) == KILLS:
                assert child.wait() == 0
                break
            try:
                child.wait(chance.uniform(0.2, 0.9) * life)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            log = cut / "log.jsonl"
            done = len(log.read_text().splitlines()) * 10 if log.exists() else 0
            kills.append(done)
            print(f"kill {len(kills)}: {done} steps logged, mask written: {(cut / 'mask.smn').exists()}", flush=True)
            if (cut / "result.json").exists():  # it got through: begin another run, the count goes on
                same = (cut / "mask.smn").read_bytes() == (whole / "mask.smn").read_bytes()
                print(f"finished in between, mask bit-identical: {same}", flush=True)
                if not same:
                    return 1
                cut = Path(folder) / f"cut{len(kills)}"
        same = (cut / "mask.smn").read_bytes() == (whole / "mask.smn").read_bytes()
    print(f"{KILLS} kills; mask bit-identical to the uninterrupted run's: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
