"""Experts side by side, each in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

import torch

from ..errors import InterruptedRunError, RunError, SelfmaskError
from ..training.loop import stop_flag
from ..training.stages import StagesDisplay
from .model import expert_name
from .run import Job, train_expert

_LOOK = 0.2  # seconds between two looks at how far the others are


class _Running(NamedTuple):
    process: SpawnProcess
    trouble: Connection
    """What an error comes home through."""
    begun: float


def side_by_side(job: Job, indices: list[int], workers: int, display: StagesDisplay) -> None:
    """Train these experts, so many at a time; what one has learned is kept, whatever becomes of the others.

    A process is asked to end by a signal, which the training loop takes as: finish this step, and save. (The pools of
    the standard library hang when a process of theirs gets one while it waits.)
    """
    threads = max(1, (os.cpu_count() or 1) // min(workers, len(indices)))
    job = dataclasses.replace(job, model=job.model.cpu())
    todo, running = list(indices), dict[int, _Running]()
    with stop_flag() as asked_to_stop:
        try:
            while todo or running:
                while todo and len(running) < workers:
                    running[todo[0]] = _begin(job, todo[0], threads)
                    del todo[0]
                time.sleep(_LOOK)
                if asked_to_stop():
                    raise InterruptedRunError(
                        "stopped; every expert saved what it had", todo="run the same command again to go on from there"
                    )
                for index, each in list(running.items()):
                    if each.process.is_alive():
                        display.share(_progress(job, index), expert_name(index))
                        continue
                    del running[index]
                    _check(each, index)
                    display.finished(expert_name(index), time.monotonic() - each.begun)
        finally:
            for each in running.values():
                each.process.terminate()
            for each in running.values():
                each.process.join()


def _begin(job: Job, index: int, threads: int) -> _Running:
    # Started anew, not forked: a copy of a process that has threads may hang.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(job, index, threads, os.getpid(), there), daemon=True)
    process.start()
    there.close()
    return _Running(process, here, time.monotonic())


def _check(each: _Running, index: int) -> None:
    """Raise what went wrong in a process that has ended."""
    try:
        if each.trouble.poll():
            raise each.trouble.recv()
    except EOFError:
        pass
    if each.process.exitcode != 0:
        raise RunError(
            f"the process that trained expert {index} was ended from outside",
            found=f"exit code {each.process.exitcode}",
            todo="run the same command again to go on from there; with fewer --workers, if memory ran out",
        )


def _train(job: Job, index: int, threads: int, parent: int, trouble: Connection) -> None:
    """In the new process: its share of the cores, and an end when the parent is gone, however that came."""
    torch.set_num_threads(threads)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)  # what is saved is whole at any moment

    threading.Thread(target=watch, daemon=True).start()
    try:
        train_expert(job, index)
    except SelfmaskError as error:
        trouble.send(error)


def _progress(job: Job, index: int) -> float:
    """How far an expert is, by its log."""
    try:
        lines = (job.expert(index) / "log.jsonl").read_text().splitlines()
        steps = json.loads((job.expert(index) / "config.json").read_text())["steps"]
        return 0.99 * float(json.loads(lines[-1])["step"]) / float(steps)
    except (OSError, ValueError, KeyError, IndexError):  # not there yet, or half written
        return 0.0
