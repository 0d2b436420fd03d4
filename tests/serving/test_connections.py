"""Clients that send too much, too slowly or not all of it, or go away: nothing is left of them."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from selfmask.serving import server as serving
from selfmask.serving.engine import Engine

from .served import (
    address_of,
    ask,
    hold,
    many,
    offline,
    photo,
    raw,
    request_head,
    save_mask,
    served,
    until,
    uri,
    vectors_of,
)

PHOTOS = [photo(number) for number in range(8)]


def test_a_body_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with served(tmp_path, max_body="100K") as (client, engine):
        assert b" 413 " in raw(client, request_head(10**9))
        assert b" 400 " in raw(client, request_head(10**30))  # no number at all
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        assert b" 413 " in raw(client, request_head(None) + chunk * 2)
        files = {"file": ("x.png", b"x" * 200_000)}
        assert client.post("/v1/embeddings", data={"model": "frozen"}, files=files).status_code == 413
        assert ask(client, "frozen", PHOTOS[0]).status_code == 200
        assert engine.queue.inside == 0


def test_bodies_of_many_requests_take_bounded_memory(tmp_path: Path) -> None:
    """Each of them is small enough, and none is whole."""
    with served(tmp_path, max_body="100K") as (client, _):
        waiting = [socket.create_connection(address_of(client)) for _ in range(17)]
        try:
            for connection in waiting:
                connection.sendall(request_head(99_999) + b" " * 99_000)
            refused = b""
            for connection in waiting:
                connection.settimeout(0.2)
                with suppress(TimeoutError):
                    refused += connection.recv(65536)
            assert b" 429 " in refused
        finally:
            for connection in waiting:
                connection.close()
        until(lambda: ask(client, "frozen", PHOTOS[0]).status_code == 200)


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    with served(tmp_path, timeout=0.3) as (client, _):
        begin = time.monotonic()
        assert b" 408 " in raw(client, request_head(100) + b"{")
        assert time.monotonic() - begin < 4


def test_a_header_that_does_not_end_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_HEADERS", 0.3)
    monkeypatch.setattr(serving, "_IDLE", 1)
    with served(tmp_path) as (client, _):
        for start in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: "):
            assert raw(client, start) == b""
        answered = raw(client, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /heal")
        assert answered.count(b"HTTP/1.1 200") == 1
        assert raw(client, b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000, wait=3) == b""
        assert client.get("/health").status_code == 200


def test_who_goes_away_is_not_worked_for(tmp_path: Path) -> None:
    """Its images are taken out of the queue."""
    with served(tmp_path, workers=1, max_hot=2) as (client, engine):
        body = json.dumps({"model": "frozen", "input": [uri(each) for each in PHOTOS]}).encode()
        held = hold(engine)
        with held:
            for _ in range(5):
                with socket.create_connection(address_of(client)) as connection:
                    connection.sendall(request_head(len(body)) + body)
                    until(lambda: engine.queue.inside > 0)
                until(lambda: _open_tickets(engine) == 0)
        until(lambda: engine.queue.inside == 0)
        assert engine.queue.waiting == 0
        assert torch.equal(vectors_of(ask(client, "frozen", *PHOTOS)), offline(None, PHOTOS))


def test_aborted_connections_leave_nothing(tmp_path: Path) -> None:
    _abort(tmp_path, 200)


@pytest.mark.heavy
def test_many_slow_or_aborted_connections_leave_nothing(tmp_path: Path) -> None:
    _abort(tmp_path, many(10_000))


def _abort(folder: Path, count: int) -> None:
    """A third of them break off, a third close politely, and a third are slow; some of these stop half-way."""
    save_mask(folder / "a.smn", 1)
    with served(folder, timeout=2.0) as (client, engine):
        body = json.dumps({"model": "a", "input": [uri(each) for each in PHOTOS]}).encode()
        whole, turns, process = request_head(len(body)) + body, random.Random(0), psutil.Process()
        answers = Counter[bytes]()

        async def one(number: int, room: asyncio.Semaphore) -> None:
            async with room:
                reader, writer = await asyncio.open_connection(*address_of(client))
                if number % 3 == 0:
                    writer.write(whole[: turns.randrange(len(whole) + 1)])
                    await asyncio.sleep(turns.random() * 0.2)
                    writer.transport.abort()
                elif number % 3 == 1:
                    writer.write(whole[: turns.randrange(len(whole) + 1)])
                    await asyncio.sleep(0.05)
                    writer.close()
                else:
                    kind = b"half" if number % 30 == 2 else b"slow"
                    for start in range(0, len(whole) // 2 if kind == b"half" else len(whole), len(whole) // 4):
                        writer.write(whole[start : start + len(whole) // 4])
                        await asyncio.sleep(0.02)
                    answers[kind + (await reader.read(12)).removeprefix(b"HTTP/1.1")] += 1
                    writer.close()

        async def all_of_them() -> None:
            room = asyncio.Semaphore(100)
            await asyncio.gather(*(one(number, room) for number in range(count)), return_exceptions=True)

        before = process.num_fds()
        asyncio.run(all_of_them())
        until(lambda: engine.queue.inside == 0 and process.num_fds() <= before + 5, 15)
        assert torch.equal(vectors_of(ask(client, "a", PHOTOS[0])), offline(folder / "a.smn", PHOTOS[:1]))
    # Late ones are told so, be it that the body did not come in time or that its turn did not.
    assert answers.keys() <= {b"half 408", b"slow 200", b"slow 408", b"slow 429", b"slow 504"}
    assert answers[b"half 408"] >= count // 30 - 1
    assert answers[b"slow 200"] > 0


def _open_tickets(engine: Engine) -> int:
    """Requests in the queue that somebody waits for."""
    with engine.queue._changed:
        jobs = [job for group in engine.queue._groups.values() for job in group]
    return sum(not job.ticket.over for job in jobs)
