"""Giving jobs to an engine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigError, InterruptedRunError, JobsError
from .by_ray import ByRay
from .by_submitit import BySubmitit
from .job import Job, Launcher

Engine = Literal["local", "slurm", "ray"]
_SHOWN = 3


def launch(
    commands: Iterable[Sequence[str]],
    engine: Engine,
    folder: Path,
    options: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Give all commands to the engine and wait for them. Those that fail are named, and the others go on.

    folder: for the logs of the jobs. options: of the jobs, as the engine names them.
    """
    jobs = [Job(tuple(words), os.getcwd()) for words in commands]  # noqa: PTH109 - it is pickled
    if not jobs:
        return
    say(f"{len(jobs):,} {'job' if len(jobs) == 1 else 'jobs'} for {engine}; logs are in {folder}")
    failed = []
    try:
        for end in _launcher(engine, folder, options).run(jobs):
            if end.trouble is not None:
                failed.append(f"{end.job}: {end.trouble}; see {end.log}")
                say(f"failed: {failed[-1]}")
    except KeyboardInterrupt:
        raise InterruptedRunError(
            "stopped; the jobs were cancelled", todo="run the same command again: what is finished is kept"
        ) from None
    if failed:
        more = f"\n... and {len(failed) - _SHOWN:,} more" if len(failed) > _SHOWN else ""
        raise JobsError(
            f"{len(failed):,} of {len(jobs):,} jobs failed",
            found="\n".join(failed[:_SHOWN]) + more,
            todo="run the same command again: what is finished is kept",
        )


def _launcher(engine: Engine, folder: Path, options: Mapping[str, Any]) -> Launcher:
    return ByRay(folder, options) if engine == "ray" else BySubmitit(engine, folder, options)


def job_options(words: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` as engines want them: numbers as such."""
    found: dict[str, Any] = {}
    for word in words:
        key, mark, value = word.partition("=")
        if not mark or not key.isidentifier():
            raise ConfigError("--job-option is not understood", expected="KEY=VALUE", found=word)
        number = re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", value)
        found[key] = value if number is None else float(value) if number[1] else int(value)
    return found
