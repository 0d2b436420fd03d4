"""`selfmask embed --shard`: one shard, all of them here, or all of them as jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .console import Console, print_json
from .launching import Launch, launch_jobs, this_command

if TYPE_CHECKING:
    from ..embedding.shards import Sharded, Shards

JOBS = "_jobs"


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


def launch_shards(shards: Shards, out: Path, engine: Launch, options: Sequence[str] | None, console: Console) -> None:
    """The command that was given, once for each shard that is missing."""
    from ..embedding.shards import missing

    kept = [word for word in this_command("--shard") if word != "--resume"]
    jobs = [[*kept, "--shard", f"{number}/{shards.of}", "--resume"] for number in missing(out, shards)]
    launch_jobs(jobs, engine, options, out / JOBS, console)
    if jobs:
        console.say(f"{len(jobs):,} of {shards.of:,} shards written to {out} by jobs")


def say_shards(out: Path, shards: Shards, done: Sharded, seconds: float, console: Console, as_json: bool) -> None:
    rows = sum(each.rows for each in done.written.values())
    bad = sum(len(each.bad) for each in done.written.values())
    if as_json:
        facts = {"written": sorted(done.written), "kept": done.kept, "of": shards.of, "finished": done.finished}
        print_json({"out": str(out), **facts, "rows": rows, "bad": bad, "seconds": seconds})
        return
    if done.written:
        kept = f", {len(done.kept):,} were there already" if done.kept else ""
        console.say(f"{len(done.written):,} of {shards.of:,} shards written to {out}{kept}: {rows:,} vectors")
    if bad:
        console.say(f"{bad:,} images could not be read and have no vector: see {out / '_shards'}")
    console.say("all shards are there" if done.finished else "some shards are still missing")
