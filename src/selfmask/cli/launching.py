"""`--launch` and `--job-option`: the jobs of a command, on an engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .console import Console


class Launch(StrEnum):
    local = "local"
    slurm = "slurm"
    ray = "ray"


LaunchOption = Annotated[
    Launch | None,
    typer.Option(
        help="Run it as jobs, and wait for them: processes of this machine (local), of Slurm, or tasks of Ray.",
        show_default=False,
    ),
]
JobOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="With --launch: option of each job, as submitit or Ray names it: timeout_min=60, slurm_partition=gpu; "
        "num_cpus=2, address=HOST:PORT.",
        show_default=False,
    ),
]


def launch_jobs(
    jobs: Sequence[Sequence[str]], engine: Launch, options: Sequence[str] | None, logs: Path, console: Console
) -> None:
    """Give these commands to the engine, and wait for them."""
    from ..commands.launch.run import job_options, launch

    launch(jobs, engine.value, logs, job_options(options or ()), console.say)


def this_command(*without: str) -> list[str]:
    """The words that were given, without some options that take a word, and without what only this process needs."""
    options = {**dict.fromkeys(without, 1), "--launch": 1, "--job-option": 1, "--json": 0}
    kept, skip = list[str](), 0
    for word in sys.argv[1:]:
        name, mark, _ = word.partition("=")
        if skip:
            skip -= 1
        elif name in options:
            skip = 0 if mark else options[name]
        else:
            kept.append(word)
    return kept
