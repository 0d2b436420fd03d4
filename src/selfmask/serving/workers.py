"""The threads that run the model: each takes a batch, runs it and answers. One that ends is replaced."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from ..errors import FailedError
from .metrics import Metrics
from .models import Model, vectors_of
from .queue import Job, Queue

_log = logging.getLogger(__name__)
_PAUSE = 0.1  # seconds after an error that may come again at once


class Workers:
    """So many threads, each with so many cores, until the queue was stopped and is empty.

    An error is the answer to the images of one batch, and the thread goes on. A thread that ends all the same starts
    another in its place; where that fails, `complete` tries again.
    """

    def __init__(self, count: int, cores: int, queue: Queue, metrics: Metrics) -> None:
        self.count, self._cores, self._queue, self._metrics = count, cores, queue, metrics
        self._changing = threading.Lock()
        self._threads: list[threading.Thread | None] = [None] * count
        self._started = self._stopping = False
        metrics.watch_workers(lambda: self.alive)

    @property
    def alive(self) -> int:
        """How many run."""
        return sum(thread is not None and thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        with self._changing:
            self._started = True
        if not self.complete():
            raise FailedError("the threads that run the model could not be started", expected=self.count)

    def complete(self) -> bool:
        """Whether all run; one that should and does not is started."""
        with self._changing:
            for number, thread in enumerate(self._threads):
                if self._started and not self._stopping and (thread is None or not thread.is_alive()):
                    self._start(number)
        return self.alive == self.count

    def stop(self) -> None:
        """Wait for them: the queue was told to stop."""
        with self._changing:
            self._stopping = True
        while thread := next((each for each in self._threads if each is not None and each.is_alive()), None):
            thread.join()

    def _start(self, number: int) -> None:
        thread = threading.Thread(target=self._live, args=(number,), name=f"worker {number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads may be had at the moment
            _log.exception("a thread could not be started")
            return
        if self._threads[number] is not None:
            _log.error("a thread that runs the model had ended, and was replaced")
            self._metrics.replaced()
        self._threads[number] = thread

    def _live(self, number: int) -> None:
        try:
            self._work()
        finally:
            self._replace(number)

    def _replace(self, number: int) -> None:
        with self._changing:
            if self._threads[number] is threading.current_thread() and not self._queue.finished:
                self._start(number)

    def _work(self) -> None:
        torch.set_num_threads(self._cores)
        while True:
            try:
                jobs = self._queue.take()
                if jobs is None:
                    return
                self._run(jobs)
                del jobs  # nothing is held while it waits
            except Exception:
                _log.exception("a batch failed")
                time.sleep(_PAUSE)

    def _run(self, jobs: Sequence[Job]) -> None:
        begin = time.monotonic()
        groups = [(model, len(list(own))) for model, own in groupby(jobs, lambda job: job.model)]
        try:
            try:
                vectors = self._vectors(jobs, groups)
            finally:  # before anyone is answered: who asks again at once finds room
                self._queue.leave(len(jobs))
            self._metrics.ran(len(jobs), len(groups), time.monotonic() - begin)
            for number, job in enumerate(jobs):
                if isinstance(vectors, Tensor):
                    job.ticket.done(job.row, vectors[number], len(jobs), len(groups))
                else:
                    job.ticket.failed(vectors)
        except BaseException as caught:  # nobody waits for what will not come
            for job in jobs:
                job.ticket.failed(_failed(caught))
            raise

    def _vectors(self, jobs: Sequence[Job], groups: Sequence[tuple[Model, int]]) -> Tensor | FailedError:
        try:
            return vectors_of(groups, torch.stack([job.pixels for job in jobs]))
        except Exception as caught:
            _log.exception("a forward pass failed")
            return _failed(caught)


def _failed(caught: BaseException) -> FailedError:
    return FailedError("the server failed", found=type(caught).__name__)
