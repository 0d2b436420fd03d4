"""`python -m benchmarks.slurm [--only works|limits] [--log FILE]`: jobs on a real Slurm of one node, which this starts.

It needs root, and Debian's packages:

apt-get install --no-install-recommends slurm-wlm slurmdbd munge mariadb-server

All of it (munged, mariadbd, slurmdbd, slurmctld, slurmd) listens on this machine only and lives in a temporary folder.
Accounting is there because submitit asks `sacct` what became of a job. First come the works of `benchmarks.fanout`,
undisturbed and with a job that is cancelled; then jobs that have not enough time, or memory. The same command goes on,
and all must end in the files of one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path

import psutil
from rich.console import Console

from .fanout import STEPS, WORKS, Found, Work, fanned, one_process, prepared, selfmask, table, told
from .load_servers import free_port

HOST = socket.gethostname().partition(".")[0]
NEEDED = ("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd", "sbatch")
PATIENCE = 60.0  # seconds to start something
LONG = 3000  # steps of experts that have not enough time
SLURM = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MailProg=/bin/true
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=3000
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
KillWait=5
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={accounts}
AccountingStoragePass={folder}/munge.socket
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory}
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
ACCOUNTS = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={accounts}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=slurm
StoragePass={password}
StorageLoc=accounts
"""


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """A Slurm of this machine alone: the variables that make its commands, and ours, find it."""
    ports = {name: free_port() for name in ("controller", "node", "accounts", "database")}
    facts = {"folder": folder, "host": HOST, "password": secrets.token_hex(8), **ports}
    facts |= {"cpus": os.cpu_count(), "memory": psutil.virtual_memory().total // 2**20 * 3 // 4}
    for name, text in (("slurm.conf", SLURM), ("slurmdbd.conf", ACCOUNTS)):
        (folder / name).write_text(text.format(**facts))
        (folder / name).chmod(0o600)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as stack:

        def start(name: str, *words: str) -> None:
            stack.enter_context(_running(folder / f"{name}.log", [name, *words], environment))

        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid"}
        files |= {"seed-file": folder / "munge.seed", "log-file": folder / "munge.log"}
        start("munged", "--foreground", "--force", *(f"--{name}={file}" for name, file in files.items()))
        _until(files["socket"].exists, "munged")

        data, door = folder / "database", folder / "mariadb.socket"
        _run("mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root", "--skip-test-db")
        reach = ("--bind-address=127.0.0.1", f"--port={ports['database']}", f"--socket={door}")
        start("mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--pid-file={data}/pid", *reach)
        _until(door.exists, "mariadbd")
        orders = ("create database accounts", f"create user slurm identified by '{facts['password']}'")
        for order in (*orders, "grant all on accounts.* to slurm"):
            _run("mariadb", "--no-defaults", f"--socket={door}", "-e", order)

        start("slurmdbd", "-D")
        _until(lambda: _works("sacctmgr", "-i", "add", "cluster", "loopback", environment=environment), "slurmdbd")
        start("slurmctld", "-D", "-i")
        start("slurmd", "-D", "-N", HOST)
        _until(lambda: "idle" in _answer("sinfo", "-h", "-o", "%t", environment=environment), "slurmd")
        try:
            yield environment
        finally:  # or jobs would outlive what runs them
            _works("scancel", "--user=root", environment=environment)
            _until(lambda: not _answer("squeue", "-h", environment=environment), "the end of all jobs")


@contextmanager
def _running(log: Path, words: Sequence[str], environment: dict[str, str]) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, env={**os.environ, **environment})
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def _until(is_so: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} does not start; see its log")
        time.sleep(0.2)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _works(*words: str, environment: dict[str, str]) -> bool:
    return subprocess.run(words, capture_output=True, env={**os.environ, **environment}).returncode == 0


def _answer(*words: str, environment: dict[str, str]) -> str:
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment}).stdout


# ---- what happens to jobs -----------------------------------------------------------------------------------------


def works(folder: Path, environment: dict[str, str]) -> Iterator[Found]:
    """All three, undisturbed, and with one of two jobs taken away in the middle."""

    def cancel(work: Work, out: Path) -> str:
        jobs = _answer("squeue", "-h", "-r", "-t", "running", "-o", "%i", environment=environment).split()
        _works("scancel", jobs[-1], environment=environment)
        return f"job {jobs[-1]} cancelled"

    for work in WORKS:
        yield fanned(folder, work, "slurm", environment=environment)
        shutil.rmtree(folder / "slurm" / work.name)
        yield fanned(folder, work, "slurm", trouble=cancel, environment=environment)


def limits(folder: Path, environment: dict[str, str], steps: int = LONG) -> Iterator[Found]:
    """Experts that take longer than their jobs may, and shards that take more memory than theirs may."""
    embed, _, cascade = WORKS
    words = [str(steps) if word == str(STEPS) else word for word in cascade.words]
    work = dataclasses.replace(cascade, name="long-cascade", words=tuple(words))
    found = fanned(folder, work, "slurm", "timeout_min=2", "slurm_signal_delay_s=30", environment=environment)
    logs = "".join(file.read_text() for file in (folder / "slurm" / work.name).rglob("*_log.out"))
    found.happened = f"time over {logs.count('Requeued job')} times"
    yield found
    work = dataclasses.replace(embed, name="large-embed")
    one_process(folder, work)
    words = [*work.words, "--out", str(folder / "slurm" / work.name), "--launch", "slurm", "--job-option"]
    text, _ = selfmask(folder, *words, "mem_gb=0.3", environment=environment).communicate(timeout=3600)
    found = fanned(folder, work, "slurm", "mem_gb=3", environment=environment)
    found.happened = next((line.strip() for line in text.splitlines() if "jobs failed" in line), "no job failed")
    found.again += 1
    yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["works", "limits"], help="one part of it")
    parser.add_argument("--steps", type=int, default=LONG, help="so many that jobs of two minutes do not suffice")
    parser.add_argument("--log", type=Path, help="where to write what is printed")
    asked = parser.parse_args()
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        sys.exit(f"not installed: {', '.join(missing)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended, whatever comes
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # rounding depends on the number of threads
    console, start = Console(width=130, record=True), time.monotonic()
    with tempfile.TemporaryDirectory() as place, cluster(Path(place)) as environment:
        console.print(_answer("scontrol", "--version", environment=environment).strip(), f"on {os.cpu_count()} cores")
        folder = prepared(Path(place) / "work")
        parts = {"works": works(folder, environment), "limits": limits(folder, environment, asked.steps)}
        found = told(chain.from_iterable([parts[asked.only]] if asked.only else parts.values()), console)
        console.print(table("slurm", found))
        columns = "JobID%12,State%20,ExitCode,Elapsed,MaxRSS,JobName"
        console.print(_answer("sacct", "-D", "-o", columns, environment=environment))
    console.print(f"{time.monotonic() - start:.0f} s")
    if asked.log is not None:
        asked.log.write_text(console.export_text())
    return 0 if all(each.fine for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
