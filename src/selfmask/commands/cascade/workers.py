"""Experts side by side, each in a process of its own."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple

import torch

from ... import checked
from ...cascade.model import expert_name
from ...errors import ConfigError, InterruptedRunError, RunError, SelfmaskError
from ...files import RunFile
from ...memory import keep_memory, share_memory
from ...stopping import start_deaf, stop_flag
from ...training import RunFolder
from ...training.display import StagesDisplay
from .expert import train_expert
from .job import Job

_LOOK = 0.2  # seconds between two looks at how far the others are


class _Running(NamedTuple):
    process: SpawnProcess
    trouble: Path
    """Where it leaves an error."""
    begun: float


def side_by_side(job: Job, indices: list[int], workers: int, display: StagesDisplay) -> None:
    """Train these experts, so many at a time; what one has learned is kept, whatever becomes of the others.

    A process is asked to end by a signal, which the training loop takes as: finish this step, and save. (The pools of
    the standard library hang when a process of theirs gets one while it waits.) Job and errors go through files: a
    process that ends while the other writes to a pipe would leave it waiting for ever.
    """
    threads = max(1, (os.cpu_count() or 1) // workers)
    todo, running = list(indices), dict[int, _Running]()
    with tempfile.TemporaryDirectory() as place, stop_flag() as asked_to_stop:
        file = Path(place) / "job"
        file.write_bytes(_pickled(dataclasses.replace(job, model=job.model.cpu())))
        try:
            while todo or running:
                while todo and len(running) < workers:
                    running[todo[0]] = _begin(file, todo[0], workers, threads)
                    del todo[0]
                time.sleep(_LOOK)
                if asked_to_stop():
                    raise InterruptedRunError(
                        "stopped; all experts are saved", todo="run the same command again to continue"
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


def _pickled(job: Job) -> bytes:
    try:
        return pickle.dumps(job)
    except Exception as error:  # whatever a model or a data set of the user's raises
        raise ConfigError(
            "the model or the images cannot be sent to another process",
            found=f"{type(error).__name__}: {error}",
            todo="train one expert at a time: workers=1",
        ) from error


def _begin(file: Path, index: int, workers: int, threads: int) -> _Running:
    # Started anew, not forked: a copy of a process that has threads may hang.
    trouble = file.with_name(f"trouble-{index}")
    arguments = (str(file), str(trouble), index, workers, threads, os.getpid())
    process = multiprocessing.get_context("spawn").Process(target=_train, args=arguments)
    start_deaf(process, signal.SIGINT)  # it is told to stop by another signal, in its turn
    return _Running(process, trouble, time.monotonic())


def _check(each: _Running, index: int) -> None:
    """Raise what went wrong in a process that has ended."""
    if each.trouble.exists():
        raise pickle.loads(each.trouble.read_bytes())  # noqa: S301 - our own, in a folder that is ours alone
    code = each.process.exitcode or 0
    if code < 0:
        raise RunError(
            f"the process that trained expert {index} was killed",
            found=f"signal {-code}",
            todo="run the same command again to continue, with fewer --workers if memory ran out",
        )
    if code > 0:
        raise RunError(
            f"the process that trained expert {index} failed; see its error above",
            found=f"exit code {code}",
            todo='in a script, call this under `if __name__ == "__main__":`, or train one expert at a time: workers=1',
        )


def _train(job: str, trouble: str, index: int, workers: int, threads: int, parent: int) -> None:
    """In the new process: its share of cores and memory, and an end when the parent is gone, however that came."""
    keep_memory()  # the process is ours, whoever's the parent is
    share_memory(workers)
    torch.set_num_threads(threads)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)  # what is saved is whole at any moment

    threading.Thread(target=watch, daemon=True).start()
    try:
        train_expert(pickle.loads(Path(job).read_bytes()), index)  # noqa: S301 - our own, as above
    except SelfmaskError as error:
        whole = Path(f"{trouble}.part")
        whole.write_bytes(pickle.dumps(error))
        whole.replace(trouble)


def _progress(job: Job, index: int) -> float:
    """How far an expert is, by its log."""
    try:
        lines = (job.expert(index) / RunFile.LOG).read_text().splitlines()
        steps = RunFolder.read_json(job.expert(index) / RunFile.CONFIG)["facts"]["steps"]
        return 0.99 * float(checked.document(lines[-1], finite=False)["step"]) / float(steps)
    except (OSError, RunError, ValueError, TypeError, KeyError, IndexError):  # not there yet, or half written
        return 0.0
