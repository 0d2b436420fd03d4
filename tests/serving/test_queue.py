"""Which images go next, and which are turned away."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from selfmask.errors import BusyError, LateError, StoppingError, TooLargeError
from selfmask.serving.queue import Job, Queue, Ticket


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def model(name: str, mixable: object = None, preprocessing: object = None) -> Any:
    kind = type("Named", (SimpleNamespace,), {"__hash__": object.__hash__})
    return kind(name=name, mixable=mixable, preprocessing=preprocessing)


def line_up(queue: Queue, clock: Clock, of: Any, count: int = 1, deadline: float = 100.0) -> list[Ticket]:
    tickets = [Ticket(1, deadline) for _ in range(count)]
    queue.enter(of.name, count)
    for ticket in tickets:
        queue.put(of.name, Job(ticket, 0, of, torch.empty(0), clock.now))
    return tickets


def names(batch: list[Job] | None) -> list[str]:
    assert batch is not None
    return [job.model.name for job in batch]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> Queue:
    return Queue(room=20, max_batch=4, max_wait=0.005, clock=clock)


def test_a_batch_is_of_one_mask_and_no_larger_than_asked(queue: Queue, clock: Clock) -> None:
    a, b = model("a"), model("b")
    line_up(queue, clock, a, 6)
    line_up(queue, clock, b, 2)
    assert [names(queue.take()) for _ in range(3)] == [["a"] * 4, ["a"] * 2, ["b"] * 2]


def test_a_rare_mask_waits_for_what_was_before_it_and_no_longer(queue: Queue, clock: Clock) -> None:
    """Though a frequent one goes on coming all the time."""
    often, rare = model("often"), model("rare")
    line_up(queue, clock, often, 6)
    clock.now = 1.0
    line_up(queue, clock, rare)
    taken = []
    for step in range(4):
        clock.now = 2.0 + step
        if "rare" not in taken:
            line_up(queue, clock, often, 3)
        taken += names(queue.take())
    assert taken.index("rare") <= 8


def test_groups_of_few_images_that_can_share_a_pass_go_together(queue: Queue, clock: Clock) -> None:
    a, b, alone, other = (model(name, *how) for name, *how in (("a", 1), ("b", 1), ("alone",), ("other", 1, "size")))
    for each in (a, alone, other, b, a):
        line_up(queue, clock, each)
        clock.now += 1.0
    assert [names(queue.take()) for _ in range(3)] == [["a", "a", "b"], ["alone"], ["other"]]


def test_a_shared_pass_is_no_larger_than_asked_and_many_images_of_a_mask_have_their_own(
    queue: Queue, clock: Clock
) -> None:
    a, b, c, often = (model(name, 1) for name in ("a", "b", "c", "often"))
    for each, count in ((a, 2), (often, 4), (b, 1), (c, 2)):
        line_up(queue, clock, each, count)
        clock.now += 1.0
    assert [names(queue.take()) for _ in range(3)] == [["a", "a", "b"], ["often"] * 4, ["c", "c"]]


def test_a_group_that_waits_for_images_is_not_taken_along(queue: Queue, clock: Clock) -> None:
    a, b = model("a", 1), model("b", 1)
    line_up(queue, clock, a)
    clock.now = 0.004
    line_up(queue, clock, b)
    queue.enter("b", 1)
    clock.now = 0.006
    assert names(queue.take()) == ["a"]


def test_who_shares_a_pass_waits_for_any_image_but_not_long_and_not_if_there_are_enough(clock: Clock) -> None:
    queue, a = Queue(room=20, max_batch=32, max_wait=0.005, clock=clock), model("a", 1)
    line_up(queue, clock, a)
    queue.enter("other", 1)
    assert queue._next(clock.now) == (None, 0.005)
    clock.now = 0.006
    assert queue._next(clock.now)[0] is a
    clock.now = 0.0
    for number in range(7):
        line_up(queue, clock, model(f"m{number}", 1))
    assert queue._next(clock.now)[0] is a


def test_a_group_waits_for_images_that_are_coming_but_not_long(queue: Queue, clock: Clock) -> None:
    a = model("a")
    line_up(queue, clock, a)
    queue.enter("a", 1)  # is being decoded
    assert queue._next(clock.now) == (None, 0.005)
    clock.now = 0.006
    assert queue._next(clock.now)[0] is a


def test_alone_it_goes_at_once(queue: Queue, clock: Clock) -> None:
    a = model("a")
    line_up(queue, clock, a)
    queue.enter("b", 1)  # of another mask
    assert queue._next(clock.now)[0] is a


def test_there_is_room_for_so_many_and_again_when_they_leave(queue: Queue, clock: Clock) -> None:
    a = model("a")
    line_up(queue, clock, a, 20)
    with pytest.raises(BusyError) as caught:
        queue.enter("a", 1)
    assert 1 <= caught.value.after <= 60
    batch = queue.take()
    assert batch is not None
    with pytest.raises(BusyError):
        queue.enter("a", 1)
    clock.now = 1.0
    queue.leave(len(batch))
    queue.enter("a", 4)
    with pytest.raises(TooLargeError):
        queue.enter("a", 21)


def test_what_nobody_waits_for_is_not_run(queue: Queue, clock: Clock) -> None:
    a = model("a")
    gone, late, fine = line_up(queue, clock, a, 1)[0], line_up(queue, clock, a, 1, 5.0)[0], line_up(queue, clock, a)[0]
    gone.future.cancel()
    clock.now = 6.0
    batch = queue.take()
    assert batch is not None
    assert [job.ticket for job in batch] == [fine]
    assert isinstance(late.future.exception(), LateError)
    queue.leave(1)
    assert queue.inside == queue.waiting == 0


def test_a_stopped_queue_gives_out_what_it_has(queue: Queue, clock: Clock) -> None:
    a = model("a")
    line_up(queue, clock, a)
    queue.stop()
    with pytest.raises(StoppingError):
        queue.enter("a", 1)
    assert names(queue.take()) == ["a"]
    ended = threading.Thread(target=queue.take, daemon=True)
    ended.start()
    queue.leave(1)
    ended.join(5)
    assert not ended.is_alive()
