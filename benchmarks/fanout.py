"""`python -m benchmarks.fanout local|ray|slurm`: jobs of an engine end in the files of one process, whatever happens.

Vectors in shards, a study and a cascade, each small: once in one process, and once as jobs (`--launch`). All files that
do not tell the time must be the same to the byte. In the middle of each, something happens: with `local`, one job is
told that its time is over, and another is killed; with `ray`, which is a cluster of two nodes on this machine, all
processes of one node are killed. `python -m benchmarks.slurm` does the same with a Slurm of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from tests.cli.test_adapt import save_clothes
from tests.studies.few import few_clothes

PHOTOS = 800
STEPS = 40  # of the dispatcher and of each expert
PATIENCE = 3600.0  # seconds
MISSES = 3  # times that a job ends before another begins, on a busy machine: then the work is begun anew
SHORT = ("--batch-size", "8", "--steps", str(STEPS), "--checkpoint-every", "5", "--log-every", "1", "--no-gate")
SHORT += ("--experts", "2", "--components", "4", "--router", "kmeans")


@dataclasses.dataclass(frozen=True)
class Work:
    """A command, what divides it into jobs, and what it leaves.

    files: those that do not tell the time. signs: of jobs that are in the middle of their work.
    """

    name: str
    words: tuple[str, ...]
    divided: tuple[str, ...]
    files: tuple[str, ...]
    signs: str


WORKS = (
    Work(
        "embed",
        ("embed", "selfmask/tiny", "selfmask/fashion", "--batch-size", "2", "--shard", "all/2"),
        (),
        ("*.parquet", "_manifest.json"),
        "_partial/*",
    ),
    Work(
        "study",
        ("study", "rules", "--data", "few.npz", "--seeds", "1"),
        ("--shard", "all/2"),
        ("cells/**/*.smn", "cells/**/*.safetensors", "results/*.csv"),
        "cells/*.lock",
    ),
    Work(
        "cascade",
        ("cascade", "photos", "--backbone", "selfmask/tiny", *SHORT),
        (),
        ("**/*.smn", "**/*.safetensors"),
        "experts/*/log.jsonl",
    ),
)


@dataclasses.dataclass
class Found:
    """What came of one work. What happened, after how many seconds, and whether the command had to be given again."""

    work: str
    seconds: float
    again: int
    happened: str
    files: int
    equal: int

    @property
    def fine(self) -> bool:
        return self.files == self.equal > 0


def prepared(folder: Path, photos: int = PHOTOS) -> Path:
    """Images to work on."""
    save_clothes(folder / "photos", photos)
    few_clothes(folder / "few.npz", train=4)
    return folder


def selfmask(folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Not in this process: what it does to the machine should end with it."""
    return subprocess.Popen(
        [sys.executable, "-m", "selfmask", *words],
        cwd=folder,
        env={**os.environ, "SELFMASK_CACHE": str(folder / "cache"), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    """What it says until it ends, which has to be well."""
    text, _ = process.communicate(timeout=PATIENCE)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}\n{text}")
    return text


def hashes(folder: Path, work: Work) -> dict[str, str]:
    files = sorted({file for pattern in work.files for file in folder.glob(pattern)})
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def one_process(folder: Path, work: Work) -> dict[str, str]:
    out = folder / "one" / work.name
    if not out.exists():
        said(selfmask(folder, *work.words, "--out", str(out)))
    return hashes(out, work)


Trouble = Callable[[Work, Path], str]
"""Does something to jobs in the middle of their work. What it did."""


def fanned(
    folder: Path,
    work: Work,
    engine: str,
    *options: str,
    trouble: Trouble | None = None,
    environment: Mapping[str, str] | None = None,
) -> Found:
    """The work as jobs, given again until it is done."""
    right, out, start = one_process(folder, work), folder / engine / work.name, time.monotonic()
    words = (*work.words, *work.divided, "--out", str(out), "--launch", engine)
    words += tuple(word for option in options for word in ("--job-option", option))
    happened, again, missed = "", -1, 0
    while again < 3:
        again += 1
        process = selfmask(folder, *words, environment=environment)
        if trouble is not None and not happened:
            if _in_the_middle(work, out, process):
                happened = trouble(work, out)
            elif missed < MISSES:
                said(process)
                shutil.rmtree(out)
                again, missed, start = -1, missed + 1, time.monotonic()
                continue
            else:
                happened = "too late"
        text, _ = process.communicate(timeout=PATIENCE)
        if "jobs failed" not in text:
            break
    if process.returncode:
        raise RuntimeError(f"{work.name} does not come to its end: exit code {process.returncode}\n{text}")
    found = hashes(out, work)
    equal = sum(found.get(name) == value for name, value in right.items())
    return Found(work.name, time.monotonic() - start, again, happened, len(right.keys() | found.keys()), equal)


def _in_the_middle(work: Work, out: Path, process: subprocess.Popen[str]) -> bool:
    """Wait until two jobs are in the middle of their work. False if that never came."""
    while len(list(out.glob(work.signs))) < 2:
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    return True


# ---- processes of this machine ------------------------------------------------------------------------------------


def time_over_and_killed(work: Work, out: Path) -> str:
    """One job is told that its time is over, as submitit does it, and another is killed. Both are of this process."""
    jobs = {}
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "submitit.core._submit" in each.cmdline():
                jobs[each.pid] = each
    first, *others = [jobs[pid] for pid in sorted(jobs)]
    first.send_signal(signal.SIGUSR2)
    for each in others[:1]:
        each.kill()
    return "time over" + (", another killed" if others else "")


# ---- two nodes of Ray -----------------------------------------------------------------------------------------------


def on_ray(folder: Path, works: tuple[Work, ...] = WORKS) -> Iterator[Found]:
    """On two nodes with a core each, one of which is killed in the middle of each work."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    from ray.cluster_utils import Cluster

    own: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**own, "include_dashboard": False})

    def kill(work: Work, out: Path) -> str:
        cluster.remove_node(other, allow_graceful=False)
        return "node killed"

    try:
        for work in works:
            other = cluster.add_node(**own)
            found = fanned(folder, work, "ray", f"address={cluster.address}", trouble=kill)
            logs = [log.read_text() for log in (folder / "ray" / work.name).rglob("*_log.out")]
            begun = sum(log.count(", process ") for log in logs)
            found.happened += f", {begun - len(logs)} of {len(logs)} jobs begun again"
            yield found
    finally:
        cluster.shutdown()


def told(found: Iterator[Found], console: Console) -> list[Found]:
    """All of it, and each in a line as soon as it is known."""
    every = []
    for each in found:
        every.append(each)
        console.print(str(each))
    return every


def table(engine: str, found: list[Found]) -> Table:
    made = Table("", "happened", "given again", "files", "equal", "seconds", title=engine, title_justify="left")
    for each in found:
        made.add_row(each.work, each.happened, str(each.again), str(each.files), str(each.equal), f"{each.seconds:.0f}")
    return made


def main() -> int:
    (engine,) = sys.argv[1:] or ["local"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # rounding depends on the number of threads
    console, trouble = Console(width=120), time_over_and_killed if engine == "local" else None
    with tempfile.TemporaryDirectory() as place:
        folder = prepared(Path(place))
        each = on_ray(folder) if engine == "ray" else (fanned(folder, w, engine, trouble=trouble) for w in WORKS)
        found = told(each, console)
    console.print(table(engine, found))
    return 0 if all(each.fine for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
