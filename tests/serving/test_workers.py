"""The threads that run the model: what waits for them, what they are stopped by, and what happens if they die."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
import torch

from selfmask.errors import StoppingError
from selfmask.serving import config
from selfmask.serving.config import ServeConfig
from selfmask.serving.engine import Engine

from .served import ask, hold, offline, photo, save_masks, served, until, vectors_of

PHOTOS = [photo(number) for number in range(8)]
KILLED = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def test_health_is_told_while_images_wait_and_when_nothing_runs(tmp_path: Path) -> None:
    with served(tmp_path, workers=1, max_hot=2) as (client, engine):
        assert client.get("/health").status_code == 200
        engine._healthy = float("-inf")
        with hold(engine):
            begin = time.monotonic()
            assert client.get("/health").status_code == 503
            assert time.monotonic() - begin < 10
        until(lambda: client.get("/health").status_code == 200)


def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    with served(tmp_path, queue=8, workers=1, max_hot=2) as (client, engine):
        with ThreadPoolExecutor(2) as pool:
            with hold(engine):
                waiting = pool.submit(ask, client, "frozen", *PHOTOS)
                until(lambda: engine.queue.inside == 8)
                refused = ask(client, "frozen", PHOTOS[0])
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert client.get("/v1/models").status_code == 200  # only images wait
            assert waiting.result().status_code == 200
        assert ask(client, "frozen", *PHOTOS, PHOTOS[0]).status_code == 413


def test_what_is_late_is_said_to_be(tmp_path: Path) -> None:
    with served(tmp_path, workers=1, max_hot=2) as (client, engine):
        with hold(engine):
            assert ask(client, "frozen", PHOTOS[0], timeout=0.2).status_code == 504
        until(lambda: engine.queue.inside == 0)
        assert ask(client, "frozen", PHOTOS[0], timeout=20).status_code == 200


def test_a_stop_finishes_what_is_there_and_takes_nothing_new(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool, served(tmp_path, workers=1, max_hot=2) as (client, engine):
        with hold(engine):
            asked = [pool.submit(ask, client, "frozen", *PHOTOS) for _ in range(3)]
            until(lambda: engine.queue.inside == 24)
            stopping = pool.submit(engine.stop)
            until(lambda: not engine.ready)
            with pytest.raises(StoppingError):
                engine.embed("frozen", [PHOTOS[0]])
            assert client.get("/ready").status_code == 503
        for each in asked:
            assert torch.equal(vectors_of(each.result()), offline(None, PHOTOS))
        stopping.result()
        assert ask(client, "frozen", PHOTOS[0]).status_code == 503


def test_an_error_of_a_worker_is_one_answer_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path, workers=1, max_hot=2) as (client, engine):
        with monkeypatch.context() as patch:

            def broken(images: torch.Tensor) -> torch.Tensor:
                raise MemoryError("not enough")

            patch.setattr(engine.store.frozen, "vectors", broken)
            answer = ask(client, "frozen", PHOTOS[0])
            assert answer.status_code == 500
            assert "not enough" not in answer.text
        assert ask(client, "frozen", PHOTOS[0]).status_code == 200
        assert engine.queue.inside == 0


def test_they_share_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "cores_here", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert (ServeConfig().threads, ServeConfig().cores, ServeConfig(workers=3).cores) == (4, 2, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert (ServeConfig().threads, ServeConfig().cores, ServeConfig(workers=1).cores) == (4, 1, 4)


def test_there_are_as_many_as_were_asked_for(tmp_path: Path) -> None:
    with served(tmp_path, workers=3, max_hot=8) as (client, engine):
        assert engine.workers.alive == 3
        assert metric(client, "selfmask_workers") == 3


@pytest.mark.parametrize("where", ["queue.take", "queue.leave", "metrics.ran"])
def test_an_error_outside_of_a_forward_pass_ends_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whoever was in that batch is told, and does not wait."""
    with served(tmp_path, workers=1, max_hot=2, timeout=20.0) as (client, engine):
        part, _, name = where.partition(".")
        owner = getattr(engine, part)
        real, broken = getattr(owner, name), [True]

        def once(*given: object) -> object:
            result = real(*given)
            if broken and not (where == "queue.take" and result):  # what it gave out would be lost, as nobody has it
                broken.clear()
                raise OSError("odd")
            return result

        monkeypatch.setattr(owner, name, once)
        begin = time.monotonic()
        assert ask(client, "frozen", PHOTOS[0]).status_code in ((200,) if where == "queue.take" else (500,))
        assert time.monotonic() - begin < 10
        assert torch.equal(vectors_of(ask(client, "frozen", *PHOTOS)), offline(None, PHOTOS))
        assert (engine.workers.alive, engine.queue.inside) == (1, 0)
        assert client.get("/health").status_code == 200


@KILLED
def test_workers_that_are_killed_are_replaced_under_load(tmp_path: Path) -> None:
    names = save_masks(tmp_path, 3)
    right = {name: offline(tmp_path / f"{name}.smn", PHOTOS[:1])[0] for name in names}
    over, codes = threading.Event(), list[int]()
    with served(tmp_path, workers=2, timeout=20.0) as (client, engine):

        def work(name: str) -> int:
            wrong = 0
            while not over.is_set():
                answer = ask(client, name, PHOTOS[0])
                codes.append(answer.status_code)
                if answer.status_code == 200:
                    wrong += not torch.allclose(vectors_of(answer)[0], right[name], atol=1e-5)
            return wrong

        with ThreadPoolExecutor(3) as pool:
            busy = [pool.submit(work, name) for name in names]
            first = killed(engine, 0)
            until(lambda: engine.workers.alive == 2 and worker(engine, 0) is not first)
            second = killed(engine, 1)
            until(lambda: engine.workers.alive == 2 and worker(engine, 1) is not second)
            served_before = codes.count(200)
            until(lambda: codes.count(200) > served_before + 20)
            over.set()
            assert [each.result() for each in busy] == [0, 0, 0]
        assert set(codes) <= {200, 500}
        assert codes.count(500) <= 6  # only what was in their hands
        assert metric(client, "selfmask_workers_replaced_total") == 2
        assert client.get("/health").status_code == 200
        assert engine.queue.inside == 0


@KILLED
def test_health_tells_of_a_worker_that_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path, workers=2) as (client, engine):
        with monkeypatch.context() as patch:

            def none_left(self: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            started = threading.Thread.start
            patch.setattr(
                threading.Thread,
                "start",
                lambda self: none_left(self) if self.name.startswith("worker") else started(self),
            )
            killed(engine, 0)
            until(lambda: engine.workers.alive == 1)
            assert client.get("/health").status_code == 503
            assert ask(client, "frozen", PHOTOS[0]).status_code == 200  # by the other one
        until(lambda: client.get("/health").status_code == 200)
        assert engine.workers.alive == 2


def worker(engine: Engine, number: int) -> threading.Thread:
    thread = engine.workers._threads[number]
    assert thread is not None
    return thread


def killed(engine: Engine, number: int) -> threading.Thread:
    """A thread of the engine, which is told to end as soon as it runs again."""
    thread = worker(engine, number)
    assert thread.ident is not None
    done = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    assert done == 1
    with engine.queue._changed:
        engine.queue._changed.notify_all()
    return thread


def metric(client: httpx2.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))
