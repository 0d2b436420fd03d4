"""`selfmask embed --shard`: one shard, all of them here, or all of them as jobs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from .console import Console, print_json

if TYPE_CHECKING:
    from ..embedding.shards import Sharded, Shards

JOBS = "_jobs"


class Launch(StrEnum):
    local = "local"
    slurm = "slurm"


def shards_named(shard: str | None, out: Path, resume: bool, launch: Launch | None) -> Shards | None:
    """What the options ask for; what cannot be is said before the work."""
    from ..embedding.shards import Shards
    from ..errors import ConfigError

    if shard is None:
        for option, given in (("--resume", resume), ("--launch", launch is not None)):
            if given:
                raise ConfigError(
                    f"{option} is for shards", todo="give --shard, or leave it out: files continue anyway"
                )
        return None
    if out.suffix in (".npz", ".parquet"):
        raise ConfigError("shards are written to a folder", expected="--out DIR", found=f"--out {out}")
    return Shards.named(shard)


def launch_shards(shards: Shards, out: Path, launch: Launch, options: Sequence[str], console: Console) -> None:
    """The command that was given, once for each shard."""
    from ..commands.launch import job_options
    from ..commands.launch import launch as launch_jobs

    kept = _without(sys.argv[1:], {"--shard": 1, "--launch": 1, "--job-option": 1, "--resume": 0, "--json": 0})
    jobs = [[*kept, "--shard", f"{number}/{shards.of}", "--resume"] for number in shards.chosen]
    launch_jobs(jobs, launch.value, out / JOBS, job_options(options), console.say)


def _without(words: Sequence[str], options: dict[str, int]) -> list[str]:
    """A command without some options, each of which takes so many words."""
    kept, skip = list[str](), 0
    for word in words:
        name, mark, _ = word.partition("=")
        if skip:
            skip -= 1
        elif name in options:
            skip = 0 if mark else options[name]
        else:
            kept.append(word)
    return kept


def say_shards(out: Path, shards: Shards, done: Sharded, seconds: float, console: Console, as_json: bool) -> None:
    rows = sum(each.rows for each in done.written.values())
    bad = sum(len(each.bad) for each in done.written.values())
    if as_json:
        facts = {"written": sorted(done.written), "kept": done.kept, "of": shards.of, "finished": done.finished}
        print_json({"out": str(out), **facts, "rows": rows, "bad": bad, "seconds": seconds})
        return
    kept = f", {len(done.kept):,} were there already" if done.kept else ""
    console.say(f"{len(done.written):,} of {shards.of:,} shards written to {out}{kept}: {rows:,} vectors")
    if bad:
        console.say(f"{bad:,} images could not be read and have no vector: see {out / '_shards'}")
    console.say("all shards are there" if done.finished else "some shards are still missing")
