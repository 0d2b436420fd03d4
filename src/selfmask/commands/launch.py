"""Commands as jobs of an engine that exists already, through submitit: processes of this machine, or Slurm.

Nothing here schedules. A job is a command that goes on where it was cut short, so that whatever an engine does to it
(kill it, stop it when its time is over, start it again), the same call finishes what is missing.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, JobsError, MissingExtraError

Engine = Literal["local", "slurm"]
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Job:
    """One command of ours, in a process of its own on whatever machine the engine chooses."""

    words: tuple[str, ...]

    def __call__(self) -> None:
        subprocess.run([sys.executable, "-m", "selfmask", *self.words], check=True)  # noqa: S603 - our own command

    def checkpoint(self) -> Any:
        """When the time of a job is over, or its machine is taken, the engine starts the same one again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def launch(
    commands: Sequence[Sequence[str]],
    engine: Engine,
    folder: Path,
    options: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Give all commands to the engine and wait for them. Those that fail are named when all have ended.

    folder: for the logs of the jobs. options: as submitit names them: timeout_min, slurm_partition, gpus_per_node, ...
    """
    try:
        import submitit
    except ImportError:
        raise MissingExtraError(
            "cannot launch jobs: submitit is not installed", todo="pip install 'selfmask[launch]'"
        ) from None
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=engine)
        executor.update_parameters(**{"timeout_min": 24 * 60, **options})
        jobs = [executor.submit(Job(tuple(words))) for words in commands]
    except (RuntimeError, NameError, ValueError, submitit.core.utils.FailedSubmissionError) as error:
        raise ConfigError(
            f"cannot launch jobs with {engine}", found=error, todo="check the engine and --job-option"
        ) from error
    say(f"{len(jobs):,} jobs were given to {engine}; their logs are in {folder}")
    failed = []
    for words, job in zip(commands, jobs, strict=True):
        if (end := job.exception()) is not None:
            failed.append(f"{' '.join(words)}: see {job.paths.stderr} ({_last_line(end)})")
    if failed:
        more = f"\n... and {len(failed) - _SHOWN:,} more" if len(failed) > _SHOWN else ""
        raise JobsError(
            f"{len(failed):,} of {len(jobs):,} jobs failed",
            found="\n".join(failed[:_SHOWN]) + more,
            todo="run the same command again: what is finished is kept",
        )


def job_options(words: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` as submitit wants them: whole numbers as such."""
    found: dict[str, Any] = {}
    for word in words:
        key, mark, value = word.partition("=")
        if not mark or not key.isidentifier():
            raise ConfigError("--job-option is not understood", expected="KEY=VALUE", found=word)
        found[key] = int(value) if value.isascii() and value.isdecimal() else value
    return found


def _last_line(error: BaseException) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
