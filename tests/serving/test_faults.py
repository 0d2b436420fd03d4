"""Files that change, images of all kinds, requests that make no sense: the server goes on, and no vector is wrong."""

from __future__ import annotations

import gc
import io
import json
import random
import struct
import threading
import time
import zlib
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from .served import ask, many, offline, photo, raw, request_head, save_mask, save_masks, served, until, uri, vectors_of

PHOTOS = [photo(number) for number in range(8)]


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
    types = ["application/json"] * 8 + ["text/plain", "multipart/form-data", "multipart/form-data; boundary=x"]
    seen: set[int] = set()
    with served(folder) as (client, engine):
        for _ in range(count):
            if turns.randrange(20) == 0:  # bytes changed anywhere in what is sent, the head included
                head = request_head(len(whole))
                data = _changed(head, turns, 4) + (_changed(whole, turns, 4) if turns.random() < 0.5 else whole)
                found = raw(client, data, wait=0.05)
                assert not found or found.split()[1][:1] in (b"2", b"4"), found
                continue
            path = turns.choice(["/v1/embeddings", "/v1/classify"])
            content, kind = _fuzzed(whole, turns), turns.choice(types)
            answer = client.post(path, content=content, headers={"content-type": kind})
            seen.add(answer.status_code)
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
            assert answer.status_code == 200 or "error" in answer.json()
        assert {200, 400} <= seen
        until(lambda: engine.queue.inside == 0)
        assert torch.equal(vectors_of(ask(client, "a", PHOTOS[0])), offline(folder / "a.smn", PHOTOS[:1]))


def _fuzzed(whole: bytes, turns: random.Random) -> bytes:
    """The body of a request: bytes changed, cut off, other values, a damaged image, or left as it is."""
    kind = turns.randrange(6)
    if kind < 2:
        return _changed(whole, turns, 8)
    if kind == 2:
        return whole[: turns.randrange(len(whole))]
    if kind == 3:
        values = [None, 1, -1e308, "x", [], {}, True, "a" * 1000, [[]], "../a", "data:,", ["data:;base64,"]]
        names = ("model", "input", "whiten", "timeout", "top")
        return json.dumps({name: turns.choice(values) for name in names}).encode()
    if kind == 4:
        return json.dumps({"model": "a", "input": uri(_changed(PHOTOS[turns.randrange(8)], turns, 20))}).encode()
    return whole


def _changed(data: bytes, turns: random.Random, most: int) -> bytes:
    """Some bytes of it are others, fewer than `most`."""
    changed = bytearray(data)
    for _ in range(turns.randrange(1, most)):
        changed[turns.randrange(len(changed))] = turns.randrange(256)
    return bytes(changed)


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
