"""What goes wrong around a server: clients, files and requests of all kinds. It goes on, and no vector is wrong."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import random
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import torch
from PIL import Image

from selfmask.errors import StoppingError
from selfmask.serving import server as serving
from selfmask.serving.engine import Engine

from .served import ask, many, offline, photo, save_mask, save_masks, served, until, uri, vectors_of

PHOTOS = [photo(number) for number in range(8)]


def address(client: httpx2.Client) -> tuple[str, int]:
    return client.base_url.host, client.base_url.port or 80


def raw(client: httpx2.Client, data: bytes, wait: float = 5.0) -> bytes:
    """What the server answers to these bytes."""
    with socket.create_connection(address(client), timeout=wait) as connection:
        answer = b""
        try:
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        except (TimeoutError, ConnectionResetError):
            pass
        return answer


def head(length: int | None, path: str = "/v1/embeddings") -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{size}\r\n\r\n".encode()


def test_a_body_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with served(tmp_path, max_body="100K") as (client, engine):
        assert b" 413 " in raw(client, head(10**9))
        assert b" 400 " in raw(client, head(10**30))  # no number at all
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        assert b" 413 " in raw(client, head(None) + chunk * 2)
        files = {"file": ("x.png", b"x" * 200_000)}
        assert client.post("/v1/embeddings", data={"model": "frozen"}, files=files).status_code == 413
        assert ask(client, "frozen", PHOTOS[0]).status_code == 200
        assert engine.queue.inside == 0


def test_bodies_of_many_requests_take_bounded_memory(tmp_path: Path) -> None:
    """Each of them is small enough, and none is whole."""
    with served(tmp_path, max_body="100K") as (client, _):
        waiting = [socket.create_connection(address(client)) for _ in range(17)]
        try:
            for connection in waiting:
                connection.sendall(head(99_999) + b" " * 99_000)
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


def test_health_is_told_while_images_wait_and_when_nothing_runs(tmp_path: Path) -> None:
    with served(tmp_path, workers=1, max_hot=2) as (client, engine):
        assert client.get("/health").status_code == 200
        engine._healthy = float("-inf")
        with hold(engine):
            begin = time.monotonic()
            assert client.get("/health").status_code == 503
            assert time.monotonic() - begin < 10
        until(lambda: client.get("/health").status_code == 200)


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    with served(tmp_path, timeout=0.3) as (client, _):
        begin = time.monotonic()
        assert b" 408 " in raw(client, head(100) + b"{")
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
                with socket.create_connection(address(client)) as connection:
                    connection.sendall(head(len(body)) + body)
                    until(lambda: engine.queue.inside > 0)
                until(lambda: _open_tickets(engine) == 0)
        until(lambda: engine.queue.inside == 0)
        assert engine.queue.waiting == 0
        assert torch.equal(vectors_of(ask(client, "frozen", *PHOTOS)), offline(None, PHOTOS))


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


def test_images_of_all_sizes_are_read_or_refused(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        dot = _png(1, 1)
        assert torch.equal(vectors_of(ask(client, "frozen", dot)), offline(None, [dot]))
        for width, height in ((1, 3000), (3000, 1)):
            assert ask(client, "frozen", _png(width, height)).status_code == 200
        answer = ask(client, "frozen", _bomb(50_000, 50_000))
        assert answer.status_code == 400
        assert "2500000000 pixels" in answer.json()["error"]["message"]
        assert "50,000,000" in ask(client, "frozen", _bomb(10_000, 10_000)).json()["error"]["message"]


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


def test_files_come_and_go_under_load_and_no_vector_is_wrong(tmp_path: Path) -> None:
    _files_come_and_go(tmp_path, seconds=1.0)


@pytest.mark.heavy
def test_files_come_and_go_under_load_for_longer(tmp_path: Path) -> None:
    _files_come_and_go(tmp_path, seconds=60.0)


def _files_come_and_go(folder: Path, seconds: float) -> None:
    """One mask is replaced, deleted, truncated and put back while it is asked for."""
    masks = folder / "masks"
    kinds = [save_mask(folder / f"{number}.smn", number, off=0.05).read_bytes() for number in range(2)]
    file = masks / "a.smn"
    masks.mkdir()
    file.write_bytes(kinds[0])
    right = [offline(folder / f"{number}.smn", PHOTOS[:1])[0] for number in range(2)]
    over, codes, errors = threading.Event(), list[int](), list[str]()
    with served(masks) as (client, _):

        def work() -> None:
            while not over.is_set():
                answer = ask(client, "a", PHOTOS[0])
                codes.append(answer.status_code)
                if answer.status_code == 200:
                    vector = vectors_of(answer)[0]
                    if not any(torch.allclose(vector, each, atol=1e-5) for each in right):
                        errors.append("wrong vector")
                elif answer.status_code not in (404, 409):
                    errors.append(answer.text)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        turns, begin = random.Random(0), time.monotonic()
        while time.monotonic() - begin < seconds:
            what = turns.choice(["one", "other", "in place", "truncated", "deleted"])
            if what == "deleted":
                file.unlink(missing_ok=True)
            elif what == "truncated":
                file.write_bytes(kinds[0][: turns.randrange(len(kinds[0]))])
            elif what == "in place":
                file.write_bytes(kinds[1])
            else:
                new = masks / ".new"
                new.write_bytes(kinds[what == "other"])
                new.replace(file)
            time.sleep(0.02)
        file.write_bytes(kinds[0])
        over.set()
        for thread in threads:
            thread.join()
        assert errors == []
        assert {200, 404, 409} <= set(codes)
        assert torch.equal(vectors_of(ask(client, "a", PHOTOS[0]))[0], right[0])


def test_fuzzed_requests_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    _fuzz(tmp_path, 200)


@pytest.mark.heavy
def test_many_fuzzed_requests_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    _fuzz(tmp_path, many(20_000))


def _fuzz(folder: Path, count: int) -> None:
    save_mask(folder / "a.smn", 1)
    turns = random.Random(0)
    whole = json.dumps({"model": "a", "input": [uri(PHOTOS[0])], "encoding_format": "float"}).encode()
    seen: set[int] = set()
    with served(folder) as (client, engine):
        for _ in range(count):
            kind = turns.randrange(6)  # the last is left as it is
            body: Any = bytearray(whole)
            if kind < 2:  # bytes changed, in the JSON or in the image
                for _ in range(turns.randrange(1, 8)):
                    body[turns.randrange(len(body))] = turns.randrange(256)
            elif kind == 2:
                body = body[: turns.randrange(len(body))]
            elif kind == 3:
                values = [None, 1, -1e308, "x", [], {}, True, "a" * 1000, [[]], "../a", "data:,", ["data:;base64,"]]
                body = json.dumps(
                    {name: turns.choice(values) for name in ("model", "input", "whiten", "timeout", "top")}
                )
            elif kind == 4:
                data = bytearray(PHOTOS[turns.randrange(8)])
                for _ in range(turns.randrange(1, 20)):
                    data[turns.randrange(len(data))] = turns.randrange(256)
                body = json.dumps({"model": "a", "input": uri(bytes(data))})
            path = turns.choice(["/v1/embeddings", "/v1/classify"])
            types = ["application/json"] * 8 + ["text/plain", "multipart/form-data", "multipart/form-data; boundary=x"]
            content = bytes(body) if isinstance(body, bytearray) else body.encode()
            answer = client.post(path, content=content, headers={"content-type": turns.choice(types)})
            seen.add(answer.status_code)
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
            assert answer.status_code == 200 or "error" in answer.json()
        assert {200, 400} <= seen
        until(lambda: engine.queue.inside == 0)
        assert torch.equal(vectors_of(ask(client, "a", PHOTOS[0])), offline(folder / "a.smn", PHOTOS[:1]))


def test_aborted_connections_leave_nothing(tmp_path: Path) -> None:
    _abort(tmp_path, 200)


@pytest.mark.heavy
def test_many_slow_or_aborted_connections_leave_nothing(tmp_path: Path) -> None:
    _abort(tmp_path, many(10_000))


def _abort(folder: Path, count: int) -> None:
    """Half of them close in the middle of a request, half of them send a little and wait."""
    save_mask(folder / "a.smn", 1)
    with served(folder, timeout=2.0) as (client, engine):
        body = json.dumps({"model": "a", "input": [uri(each) for each in PHOTOS]}).encode()
        whole, turns, process = head(len(body)) + body, random.Random(0), psutil.Process()

        async def one(number: int, room: asyncio.Semaphore) -> None:
            async with room:
                _, writer = await asyncio.open_connection(*address(client))
                writer.write(whole[: turns.randrange(len(whole) + 1)])
                if number % 2:
                    await asyncio.sleep(turns.random() * 0.2)
                    writer.transport.abort()
                else:
                    await asyncio.sleep(0.05)
                    writer.close()

        async def all_of_them() -> None:
            room = asyncio.Semaphore(100)
            await asyncio.gather(*(one(number, room) for number in range(count)), return_exceptions=True)

        before = process.num_fds()
        asyncio.run(all_of_them())
        until(lambda: engine.queue.inside == 0 and process.num_fds() <= before + 5, 15)
        assert torch.equal(vectors_of(ask(client, "a", PHOTOS[0])), offline(folder / "a.smn", PHOTOS[:1]))


@pytest.mark.heavy
def test_memory_stays_flat(tmp_path: Path) -> None:
    """A soak of a minute with more masks than fit; the first half is for what grows once."""
    names = save_masks(tmp_path, 24)
    with served(tmp_path, memory="1M", max_hot=4) as (client, _):
        turns, process, sizes = random.Random(0), psutil.Process(), list[int]()
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < 60:
            ask(client, turns.choice(names), PHOTOS[turns.randrange(8)])
            if now > 30:
                gc.collect(0)
                sizes.append(process.memory_info().rss)
    first, last = sizes[: len(sizes) // 4], sizes[-len(sizes) // 4 :]
    assert sum(last) / len(last) < 1.03 * sum(first) / len(first)


# ---- helpers --------------------------------------------------------------------------------------------------------


class hold:  # noqa: N801
    """Within, the workers of an engine wait before they run anything."""

    def __init__(self, engine: Engine) -> None:
        self.frozen, self.go = engine.store.frozen, threading.Event()

    def __enter__(self) -> None:
        real = type(self.frozen).vectors

        def waiting(images: torch.Tensor) -> torch.Tensor:
            assert self.go.wait(30)
            return real(self.frozen, images)

        self.frozen.vectors = waiting  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self.frozen.vectors
        self.go.set()


def _open_tickets(engine: Engine) -> int:
    """Requests in the queue that somebody waits for."""
    with engine.queue._changed:
        jobs = [job for group in engine.queue._groups.values() for job in group]
    return sum(not job.ticket.over for job in jobs)


def _png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


def _bomb(width: int, height: int) -> bytes:
    """The start of a PNG of that size, in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packed = zlib.compress(b"\0" * 10_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
