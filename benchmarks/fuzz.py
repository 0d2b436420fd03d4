"""`python -m benchmarks.fuzz`: a million damaged files of every kind that we read, and what became of them.

Allowed are our own typed errors, and the right content. Everything else is a crash: another exception, content that a
hash should have kept out, more than 20 seconds of work. Each mutation has a seed of its own: `--only FORMAT --from
NUMBER --mutations 1` repeats one.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from tests.fuzzing.formats import FORMATS, LOADED, try_one
from tests.fuzzing.memory import growth
from tests.fuzzing.mutations import container
from tests.maskfile.tiny import masked_with

from selfmask import MaskedModel
from selfmask.errors import MaskFileError

CHUNK, PATIENCE, SECONDS_BETWEEN_LINES = 500, 20, 30
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a disk would take longer to write files than we to read
ON_A_LARGE_BASE = 300


class Chunk(NamedTuple):
    """Mutations of one format, by number."""

    name: str
    start: int
    count: int


class Result(NamedTuple):
    chunk: Chunk
    outcomes: Counter[str]
    crashes: list[str]
    memory: int


def run_chunk(chunk: Chunk) -> Result:
    outcomes, crashes = Counter[str](), list[str]()
    signal.signal(signal.SIGPROF, _too_long)  # by the clock of the process: the machine may be busy
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:

        def run() -> None:
            for number in range(chunk.start, chunk.start + chunk.count):
                signal.setitimer(signal.ITIMER_PROF, PATIENCE)
                try:
                    outcomes[try_one(chunk.name, number, Path(folder))] += 1
                except Exception as error:
                    crashes.append(f"{chunk.name}/{number}: {error!r}"[:300])
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)

        memory = growth(run)
    return Result(chunk, outcomes, crashes, memory)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {PATIENCE} s of work")


def chunks(mutations: int, only: str | None, first: int) -> Iterator[Chunk]:
    """All formats in turn, so that a run cut short has tried each in its share."""
    left = {name: mutations if only else each.share * mutations // 1000 for name, each in FORMATS.items()}
    left = {name: count for name, count in left.items() if only in (None, name)}
    done = dict.fromkeys(left, first)
    rounds = max(1, mutations // 20_000)
    for turn in range(rounds):
        for name, count in left.items():
            end = first + count * (turn + 1) // rounds
            while done[name] < end:
                size = min(CHUNK, end - done[name])
                yield Chunk(name, done[name], size)
                done[name] += size


def run_all(todo: Iterator[Chunk], workers: int, total: int, seconds: float) -> list[Result]:
    """In processes of their own, of which one may die without the others; told now and then, with the time left."""
    results: list[Result] = []
    start = last = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running: set[Future[Result]] = {pool.submit(run_chunk, chunk) for chunk in islice(todo, workers)}
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            results += (ended := [future.result() for future in finished])
            for crash in (crash for result in ended for crash in result.crashes):
                print(crash, flush=True)
            now = time.monotonic()
            if now - start < seconds:
                running |= {pool.submit(run_chunk, chunk) for chunk in islice(todo, len(finished))}
            if now - last >= SECONDS_BETWEEN_LINES:
                done = sum(result.chunk.count for result in results)
                crashes = sum(len(result.crashes) for result in results)
                left = (now - start) * (total - done) / done
                print(f"{done:,} of {total:,}, {crashes} crashes, {left / 60:.0f} min left", flush=True)
                last = now
    return results


def on_a_large_base() -> str:
    """Memory for damaged masks of a network of 45 MB, against twice the network."""
    base = timm.create_model("resnet18", num_classes=0).eval()
    size = sum(4 * parameter.numel() for parameter in base.parameters())
    data = masked_with(base, "sparse").mask_bytes()
    masked = MaskedModel(base)
    outcomes = Counter[str]()

    def run() -> None:
        for number in range(ON_A_LARGE_BASE):
            damaged, _ = container(data, "manifest", random.Random(f"large/{number}"))
            try:
                masked.load_mask(damaged, "fuzzed")
            except MaskFileError as error:
                outcomes[type(error).__name__] += 1
            else:
                outcomes[LOADED] += 1
                masked._active = None
                masked.delete_mask("fuzzed")

    taken = growth(run)
    told = ", ".join(f"{name} {count}" for name, count in outcomes.most_common())
    verdict, base_mb = "holds" if taken <= 2 * size else "EXCEEDED", size / 1e6
    return (
        f"memory: {ON_A_LARGE_BASE} damaged masks of a ResNet-18 ({base_mb:.0f} MB) took at most {taken / 1e6:.1f} MB"
        f" more; limit, twice the base: {2 * base_mb:.0f} MB: {verdict}\n  ({told})"
    )


def table(results: list[Result]) -> str:
    rows = [f"{'format':16} {'mutations':>10} {'refused':>10} {'loaded':>9} {'crashes':>8} {'peak MB':>8}  refusals"]
    for name in [*FORMATS, "all"]:
        own = [result for result in results if name in ("all", result.chunk.name)]
        if not own:
            continue
        outcomes = sum((result.outcomes for result in own), Counter[str]())
        loaded, crashes = outcomes.pop(LOADED, 0), sum(len(result.crashes) for result in own)
        kinds = "" if name == "all" else ", ".join(f"{kind} {count:,}" for kind, count in outcomes.most_common())
        count, peak = sum(result.chunk.count for result in own), max(result.memory for result in own) / 1e6
        rows.append(f"{name:16} {count:10,} {outcomes.total():10,} {loaded:9,} {crashes:8,} {peak:8.1f}  {kinds}")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long, and tell what ran")
    parser.add_argument("--only", choices=sorted(FORMATS))
    parser.add_argument("--from", type=int, default=0, dest="first")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    todo = chunks(given.mutations, given.only, given.first)
    results = run_all(todo, max(1, min(given.workers, os.cpu_count() or 1)), given.mutations, 60 * given.minutes)
    crashes = [crash for result in results for crash in result.crashes]
    print(table(results))
    print("\n".join(crashes[:50]) or "no crashes")
    print(on_a_large_base())
    print(f"{time.monotonic() - start:,.0f} s")
    return 1 if crashes else 0


if __name__ == "__main__":
    sys.exit(main())
