"""A job, and what an engine has to do with it.

A job is a command that goes on where it was cut short, so that whatever an engine does to it (kill it, stop it when its
time is over, start it again on another machine), it or the same command finishes what is missing.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from ...stopping import deaf_children

_LOOK = 0.2  # seconds between two looks at the command
_TO_SAVE = 60.0  # seconds that a command has to finish its step, of the 90 that Slurm gives before the end
_LAST = 1 << 16  # bytes of a log that are looked through for what went wrong


@dataclasses.dataclass
class Job:
    """One command of ours, in a process of its own, on whatever machine the engine chooses.

    words: of the command. folder: where it was given; every machine must have it at the same place.
    """

    words: tuple[str, ...]
    folder: str
    _process: subprocess.Popen[bytes] | None = dataclasses.field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return " ".join(self.words)

    def __call__(self, output: IO[bytes] | None = None, environment: Mapping[str, str] | None = None) -> None:
        """Run it, and wait for it. output: where it prints to. environment: variables that it gets besides its own."""
        words = [sys.executable, "-m", "selfmask.cli.child", *self.words]
        with _deaf():
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                words,
                cwd=self.folder,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,  # when this process is gone, however that came, it is closed, and the child ends
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
            )
        with self._process as process:
            try:
                while (code := process.poll()) is None:
                    time.sleep(_LOOK)  # not `wait`, which would hold a lock that `checkpoint` needs
            except BaseException:  # the engine wants it to end, now
                process.kill()
                raise
        if code:
            raise RuntimeError(f"it ended with {_ending(code)}")

    def checkpoint(self) -> Any:
        """submitit calls this when the time of a job is over, or its machine is taken, and starts the result later."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_TO_SAVE)
        return DelayedSubmission(Job(self.words, self.folder))


class End(NamedTuple):
    """How a job ended. trouble: what went wrong; None if nothing did."""

    job: Job
    log: Path
    trouble: str | None


class Launcher(Protocol):
    """An engine."""

    def run(self, jobs: Sequence[Job]) -> Iterator[End]:
        """Give it all jobs, and tell how each ended. If nobody waits for that any more, they are cancelled."""


def last_error(log: Path, otherwise: str) -> str:
    """The error that a log tells of, in a line; if it tells none, something else."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    return next((line.strip() for line in reversed(lines) if line.startswith("error:")), otherwise)


def _deaf() -> AbstractContextManager[None]:
    """While the child starts: Slurm tells all processes of a job when its time is over, and that would end it."""
    return deaf_children(signal.SIGUSR2) if hasattr(signal, "SIGUSR2") else nullcontext()


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
