"""The queue: images that wait for the model, in groups that one forward pass can take."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from ..errors import BusyError, FailedError, LateError, StoppingError, TooLargeError
from .models import Model, can_share

Clock = Callable[[], float]
_ALONE = 4  # images of a mask, from which on they have a pass to themselves
_ENOUGH = 8  # images for a pass that masks share: more of them save little


class Ticket:
    """A request: its vectors, when all are there. Whoever cancels `future` gets nothing, and costs nothing more."""

    def __init__(self, count: int, deadline: float, model: Model | None = None) -> None:
        self.future: Future[Tensor] = Future()
        self.deadline = deadline
        self._model, self._finding = model, threading.Lock()
        self.batches: list[int] = [0] * count
        """How many images were in the forward pass of each."""
        self.masks: list[int] = [0] * count
        """Of how many models."""
        self._rows: list[Tensor | None] = [None] * count
        self._left, self._lock = count, threading.Lock()

    def done(self, row: int, vector: Tensor, batch: int, masks: int = 1) -> None:
        with self._lock:
            self._rows[row], self.batches[row], self.masks[row] = vector, batch, masks
            self._left -= 1
            if self._left:
                return
        if self.future.set_running_or_notify_cancel():
            try:
                vectors = torch.stack([each for each in self._rows if each is not None])
            except BaseException as error:  # such as too little memory: else somebody would wait in vain
                self.future.set_exception(FailedError("the server failed", found=type(error).__name__))
                raise
            self.future.set_result(vectors)

    def failed(self, error: BaseException) -> None:
        with self._lock:
            if self.future.done() or self._left <= 0:
                return
            self._left = -1
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def model(self, find: Callable[[], Model]) -> Model:
        """The model for all images of the request, found once: its file may be replaced meanwhile."""
        if self._model is None:
            with self._finding:
                self._model = self._model or find()
        return self._model

    @property
    def over(self) -> bool:
        return self.future.done()


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One image of a request, decoded and fitted."""

    ticket: Ticket
    row: int
    model: Model
    pixels: Tensor
    since: float


class Queue:
    """Images by model. Those of the model whose first image waits longest go next, at most `max_batch` of them.

    So a frequent mask fills batches while others have their turn, and a rare one waits no longer than it takes to run
    what was there before it. A group goes when it is full, when its first image has waited `max_wait` seconds, or when
    no other image of its mask is on its way. Groups of a few images that can share a pass go together: when they are
    enough, or no image is on its way.
    """

    def __init__(self, room: int, max_batch: int, max_wait: float, clock: Clock = time.monotonic) -> None:
        """room: images that may be between `enter` and `leave`."""
        self.room, self.max_batch, self.max_wait, self._clock = room, max_batch, max_wait, clock
        self._changed = threading.Condition()
        self._groups: dict[Model, deque[Job]] = {}
        self._coming: Counter[str] = Counter()
        self._inside = self._waiting = 0
        self._stopped = False
        self._speed = 0.0  # images a second, of late
        self._last = clock()

    @property
    def inside(self) -> int:
        """Images that were accepted and are not answered yet."""
        return self._inside

    @property
    def waiting(self) -> int:
        """Those of them that are ready to run."""
        return self._waiting

    @property
    def finished(self) -> bool:
        """Whether it was stopped, and nothing is left to do."""
        return self._stopped and not self._inside

    def enter(self, name: str, count: int) -> None:
        """Take in so many images of a mask, which `put` or `leave` will follow; or refuse them, if there is no room."""
        if count > self.room:
            raise TooLargeError(
                "there are more images in the request than the queue holds",
                expected=f"at most {self.room}",
                found=count,
            )
        with self._changed:
            if self._stopped:
                raise StoppingError("the server is stopping", todo="try again later")
            if self._inside + count > self.room:
                after = min(60.0, max(1.0, self._inside / self._speed)) if self._speed else 1.0
                raise BusyError(
                    "too many images are waiting",
                    expected=f"at most {self.room}",
                    found=self._inside + count,
                    todo=f"try again in {after:.0f} s",
                    after=after,
                )
            self._inside += count
            self._coming[name] += count

    def put(self, name: str, job: Job) -> None:
        """Line up an image that has entered under this name."""
        with self._changed:
            self._arrived(name)
            self._groups.setdefault(job.model, deque()).append(job)
            self._waiting += 1
            self._changed.notify()

    def first(self, job: Job) -> None:
        """An image that is nobody's request goes before all others, even where there is no room."""
        with self._changed:
            if self._stopped:
                raise StoppingError("the server is stopping")
            self._inside += 1
            self._waiting += 1
            self._groups.setdefault(job.model, deque()).appendleft(job)
            self._changed.notify()

    def lost(self, name: str) -> None:
        """An image that has entered will not come."""
        with self._changed:
            self._arrived(name)
            self._inside -= 1
            self._changed.notify_all()

    def leave(self, count: int) -> None:
        """So many images that `take` gave are done with."""
        with self._changed:
            self._inside -= count
            now = self._clock()
            rate = count / max(now - self._last, 1e-6)
            self._speed = rate if not self._speed else 0.9 * self._speed + 0.1 * rate
            self._last = now
            self._changed.notify_all()

    def take(self) -> list[Job] | None:
        """The next batch, of one model, or of one after the other: waits for it. None when the queue was stopped and
        is empty."""
        with self._changed:
            while True:
                now = self._clock()
                model, until = self._next(now)
                if model is not None and (batch := self._batch(model, now)):
                    return batch
                if model is None:
                    if self.finished:
                        return None
                    self._changed.wait(None if until is None else max(until - now, 1e-4))

    def stop(self) -> None:
        """Take in nothing more; what is inside is finished."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _next(self, now: float) -> tuple[Model | None, float | None]:
        """The model to run, or else when to look again."""
        best: Model | None = None
        oldest, until = 0.0, None
        for model, group in self._groups.items():
            since = group[0].since
            if not self._is_ready(model, now):
                until = min(since + self.max_wait, until or float("inf"))
            elif best is None or since < oldest:
                best, oldest = model, since
        return best, until

    def _is_ready(self, model: Model, now: float) -> bool:
        group = self._groups[model]
        if len(group) >= self.max_batch or group[0].since + self.max_wait <= now:
            return True
        if model.mixable is not None and len(group) < _ALONE:  # others may come along
            return self._waiting >= _ENOUGH or not self._coming
        return not self._coming[model.name]

    def _batch(self, model: Model, now: float) -> list[Job]:
        """Images of this model, and of others that share their pass, those that wait longest first."""
        batch = self._drawn(model, now)
        if not 0 < len(batch) < _ALONE:
            return batch
        others = [
            other
            for other, group in self._groups.items()
            if len(group) < _ALONE
            and can_share(model, other)
            and (not self._coming[other.name] or group[0].since + self.max_wait <= now)
        ]
        for other in sorted(others, key=lambda other: self._groups[other][0].since):
            if len(batch) + len(self._groups[other]) > self.max_batch:
                break
            batch += self._drawn(other, now)
        return batch

    def _drawn(self, model: Model, now: float) -> list[Job]:
        """Those that still wait for an answer; what nobody waits for any more is dropped here."""
        group, batch, dropped = self._groups[model], list[Job](), 0
        while group and len(batch) < self.max_batch:
            job = group.popleft()
            self._waiting -= 1
            if job.ticket.deadline <= now:
                job.ticket.failed(late())
            if job.ticket.over:
                dropped += 1
            else:
                batch.append(job)
        if not group:
            del self._groups[model]
        self._inside -= dropped
        return batch

    def _arrived(self, name: str) -> None:
        self._coming[name] -= 1
        if not self._coming[name]:
            del self._coming[name]


def late() -> LateError:
    return LateError("the request was not done in time", todo="send fewer images, or try again later")
