"""What every request passes first: keys, the size and pace of its body, and the count of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ..errors import BusyError, FailedError, NotAllowedError, SelfmaskError, SlowRequestError, TooLargeError
from .answers import as_response
from .config import is_loopback
from .keys import Keys, key_in
from .metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
_BODIES = 16  # of the largest size, that may be in memory at a time
_log = logging.getLogger(__name__)
OPEN = "/health"
"""The one path that needs no key."""
ADMIN = "/v1/masks"


class _Held:
    """Bytes of a request's body that are in memory."""

    bytes = 0


class Gate:
    """ASGI middleware. Without keys, only requests that name this machine as their host are let in: a page of another
    site that has its name lead here (DNS rebinding) names that site."""

    def __init__(
        self,
        app: App,
        *,
        metrics: Metrics,
        routes: frozenset[str],
        user: Keys | None,
        admin: Keys | None,
        max_body: int,
        timeout: float,
        any_host: bool,
    ) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes
        self._user, self._admin = user, admin
        self._max_body, self._timeout, self._any_host = max_body, timeout, any_host
        self._held = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        status: int | None = None
        held = _Held()

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                headers = dict(scope["headers"])
                self._admit(scope["path"], headers)
                limited = self._limited(headers, receive, held)
            except SelfmaskError as error:
                await as_response(error, browser=b"text/html" in dict(scope["headers"]).get(b"accept", b""))(
                    scope, receive, told
                )
                return
            await self._app(scope, limited, told)
        except Exception:  # a fault of ours: what it was is in the log, and none of the client's business
            _log.exception("a request failed")
            if status is None:
                await as_response(FailedError("the server failed"))(scope, receive, told)
        finally:
            self._held -= held.bytes
            path = scope["path"]
            route = path if path in self._routes else ADMIN if path.startswith(f"{ADMIN}/") else "other"
            self._metrics.answered(route, status or 500, time.perf_counter() - begin)

    def _admit(self, path: str, headers: dict[bytes, bytes]) -> None:
        if path == OPEN:
            return
        if path == ADMIN or path.startswith(f"{ADMIN}/"):
            if self._admin is None:
                raise NotAllowedError("masks cannot be changed here: the server has no --admin-key-file")
            keys: Keys | None = self._admin
        else:
            keys = self._user
        if keys is None:
            host = headers.get(b"host", b"").decode("latin-1").rpartition(":")
            if not self._any_host and not is_loopback(host[0] if host[2].isdigit() and host[0] else "".join(host)):
                raise NotAllowedError("without a key, only this machine is served, under its own name")
            return
        given = key_in(headers, basic=keys is self._user)
        if given is None or not keys.holds(given):
            raise NotAllowedError(
                "a key is missing" if given is None else "the key is not one that opens this",
                expected="Authorization: Bearer KEY",
            )

    def _limited(self, headers: dict[bytes, bytes], receive: Receive, held: _Held) -> Receive:
        """The body of the request, if it is not too large and does not take too long."""
        told = headers.get(b"content-length", b"0")
        if told.isdigit() and int(told[:20]) > self._max_body:
            raise self._too_large(int(told[:20]))
        whole, deadline = False, time.monotonic() + self._timeout

        async def limited() -> Message:
            nonlocal whole
            if whole:  # what comes now is that the client has gone
                return await receive()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise SlowRequestError("the request did not come in time", expected=f"{self._timeout:g} s") from None
            size = len(message.get("body", b""))
            held.bytes += size
            self._held += size
            if held.bytes > self._max_body:
                raise self._too_large(held.bytes)
            if self._held > _BODIES * self._max_body:
                raise BusyError("too much is being sent at once", todo="try again in 1 s")
            whole = not message.get("more_body", False)
            return message

        return limited

    def _too_large(self, found: int) -> TooLargeError:
        return TooLargeError(
            "the request is too large", expected=f"at most {self._max_body:,} bytes", found=f"{found:,} or more"
        )
