"""Requests that travel to another process: what is seen of them, and that the answer is the app's own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from selfmask.errors import BusyError
from selfmask.serving.app import create_app
from selfmask.serving.config import ServeConfig
from selfmask.serving.engine import Engine
from selfmask.serving.forwarding import Answer, Asked, Forward, answer_of, answer_to

from .served import PATIENT, backbone, offline, photo, uri

PHOTOS = [photo(number) for number in range(3)]


def asked(path: str, body: bytes, content_type: str = "application/json", query: bytes = b"", **headers: str) -> Asked:
    own = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Asked("POST", path, query, [(b"host", b"localhost"), (b"content-type", content_type.encode()), *own], body)


FORM = b"".join(
    [
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n"model": "no"\x00\r\n',
        b'--x\r\nContent-Disposition: form-data; name="model"\r\nContent-Type: text/plain\r\n\r\nbirds\r\n--x--\r\n',
    ]
)


@pytest.mark.parametrize(
    ("request_", "mask"),
    [
        (asked("/v1/embeddings", json.dumps({"input": uri(PHOTOS[0]), "model": "birds"}).encode()), "birds"),
        (asked("/v1/classify", b'{"model" : "birds-2"}'), "birds-2"),
        (asked("/v1/embeddings", FORM.replace(b'"model": "no"', b""), "multipart/form-data; boundary=x"), "birds"),
        (asked("/v1/embeddings", b"", query=b"model=birds&x=1"), "birds"),
        (asked("/v1/embeddings", b'{"model": "birds"}', x_selfmask_model="cats"), "cats"),
        (asked("/v1/embeddings", b'{"model": ["birds"]}'), None),
        (asked("/v1/embeddings", b"\xff\x00"), None),
        (asked("/v1/embeddings", b'{"model": "' + b"x" * 1000 + b'"}'), None),
        (asked("/v1/masks", b'{"model": "birds"}'), None),
    ],
)
def test_the_mask_of_a_request_is_seen(request_: Asked, mask: str | None) -> None:
    assert request_.mask == mask


def test_only_what_changes_nothing_is_asked_twice() -> None:
    assert asked("/v1/embeddings", b"").may_be_repeated
    assert asked("/v1/masks", b"")._replace(method="GET").may_be_repeated
    assert not asked("/v1/masks", b"").may_be_repeated
    assert not asked("/v1/masks/birds", b"")._replace(method="DELETE").may_be_repeated


def test_the_answer_of_the_app_comes_back_whole(masks: Path) -> None:
    with Engine(backbone(), masks, ServeConfig(workers=1, **PATIENT)) as engine:
        app: Any = create_app(engine)
        body = json.dumps({"model": "m1", "input": [uri(each) for each in PHOTOS]}).encode()

        async def both() -> tuple[Answer, Answer]:
            forward = Forward(lambda request: answer_to(app, request))
            scope = {
                "type": "http",
                "method": "POST",
                "path": "/v1/embeddings",
                "headers": [(b"Host", b"localhost"), (b"content-type", b"application/json")],
            }
            parts = [body[:1000], body[1000:]]

            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

            return await answer_of(forward, scope, receive), await answer_to(app, asked("/v1/nothing", b""))

        found, missing = asyncio.run(both())
    assert (found.status, missing.status) == (200, 404)
    assert dict(found.headers)[b"x-selfmask-batch"] == b"3,3,3"
    vectors = torch.tensor([each["embedding"] for each in json.loads(found.body)["data"]])
    assert torch.equal(vectors, offline(masks / "m1.smn", PHOTOS))


def test_an_error_of_whoever_asks_is_told_as_the_app_tells_it() -> None:
    async def busy(request: Asked) -> Answer:
        raise BusyError("too many images are waiting", after=3.0)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    found = asyncio.run(answer_of(Forward(busy), scope, receive))
    assert found.status == 429
    assert dict(found.headers)[b"retry-after"] == b"3"
