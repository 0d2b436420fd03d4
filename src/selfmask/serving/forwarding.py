"""Requests that another process answers: what of a request travels there, and which mask it is for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from fastapi import Response

from ..errors import SelfmaskError
from .answers import as_response
from .gate import App, Message, Receive, Send

MODEL_HEADER = b"x-selfmask-model"
"""In which clients may name the mask once more, for whoever does not read bodies."""
_LONGEST = 300  # letters of a name
_IN_JSON = re.compile(rb'"model"\s*:\s*"([^"\\]{1,%d})"' % _LONGEST)
_IN_FORM = re.compile(rb'name="?model"?\s*?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,%d})\r\n' % _LONGEST)
_IMAGE_PATHS = ("/v1/embeddings", "/v1/classify", "/v1/search")
Headers = list[tuple[bytes, bytes]]


class Asked(NamedTuple):
    """A request, all of it."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes

    @property
    def mask(self) -> str | None:
        """The mask that it is for, as far as that shows at a glance: for the choice of who answers, and no more."""
        named = dict(self.headers).get(MODEL_HEADER)
        if named is None and self.path in _IMAGE_PATHS:
            found = _IN_JSON.search(self.body) or _IN_FORM.search(self.body)
            named = found[1] if found else parse_qs(self.query).get(b"model", [None])[0]
        return None if not named else named[:_LONGEST].decode("utf-8", "replace")

    @property
    def may_be_repeated(self) -> bool:
        """Whether it does no harm to ask a second time, not knowing what became of the first."""
        return self.method in ("GET", "HEAD") or self.path in _IMAGE_PATHS


class Answer(NamedTuple):
    status: int
    headers: Headers
    body: bytes


class Forward:
    """An ASGI app that has others answer: `ask` gives their answer, or an error that clients are told."""

    def __init__(self, ask: Callable[[Asked], Awaitable[Answer]]) -> None:
        self._ask = ask

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            answer = await self._ask(await _received(scope, receive))
        except SelfmaskError as error:
            await as_response(error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        await send({"type": "http.response.body", "body": answer.body})


async def answer_of(app: App, scope: MutableMapping[str, Any], receive: Receive) -> Answer:
    """What an ASGI app says, when it has said it all."""
    status, headers, parts = 500, Headers(), list[bytes]()

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], [(bytes(name), bytes(value)) for name, value in message["headers"]]
        elif message["type"] == "http.response.body":
            parts.append(bytes(message.get("body", b"")))

    await app(scope, receive, send)
    return Answer(status, headers, b"".join(parts))


async def answer_to(app: App, asked: Asked) -> Answer:
    """The same, for a request that came from elsewhere."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "root_path": "",
        "query_string": asked.query,
        "headers": asked.headers,
        "client": None,
        "server": None,
    }
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:  # who asked goes away by cancelling, and not by saying so
            await asyncio.get_running_loop().create_future()
        given = True
        return {"type": "http.request", "body": asked.body, "more_body": False}

    return await answer_of(app, scope, receive)


def as_starlette(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers = list(answer.headers)
    return response


async def _received(scope: MutableMapping[str, Any], receive: Receive) -> Asked:
    parts, more = list[bytes](), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    headers = [(bytes(name).lower(), bytes(value)) for name, value in scope["headers"]]
    return Asked(scope["method"], scope["path"], scope.get("query_string", b""), headers, b"".join(parts))
