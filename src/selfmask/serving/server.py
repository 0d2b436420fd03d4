"""The app on a port: uvicorn, with connections that may not take for ever."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import psutil
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .config import ServeConfig

_HEADERS = 10.0  # seconds for the first line and the headers of a request
_HEADER_BYTES = 1 << 16
_IDLE = 30  # seconds between requests
_CONNECTIONS = 4096
_FINISH = 60  # seconds for what is under way when the server is told to stop


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's own, which would wait for ever for the end of a header, however long it gets."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unread = 0
        self._patience: asyncio.TimerHandle | None = None
        self._expect()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:  # a request has begun
            self._unread = 0
            self._expect(False)
        elif self.cycle is None or self.cycle.response_complete:
            self._unread += len(data)
            if self._unread > _HEADER_BYTES:
                self.transport.close()
            elif self._patience is None:
                self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(False)
        super().connection_lost(exc)

    def _expect(self, something: bool = True) -> None:
        """Whether the start of a request is to come soon."""
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self.loop.call_later(_HEADERS, self._too_slow) if something else None

    def _too_slow(self) -> None:
        self._patience = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def server_of(app: FastAPI, config: ServeConfig, **more: Any) -> uvicorn.Server:
    """uvicorn, ready to run."""
    settings: dict[str, Any] = {"access_log": False, "log_level": "warning", "loop": "auto"} | more
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=PatientProtocol,
            ws="none",
            timeout_keep_alive=_IDLE,
            limit_concurrency=_CONNECTIONS,
            timeout_graceful_shutdown=_FINISH,
            server_header=False,
            **settings,
        )
    )


def run(app: FastAPI, config: ServeConfig) -> None:
    """Serve until told to stop (SIGTERM, Ctrl-C): what is under way is finished, and nothing new is taken."""
    _allow_connections()
    server_of(app, config, log_level="info").run()


def _allow_connections() -> None:
    """As many open files as may be: every connection is one."""
    if not hasattr(psutil, "RLIMIT_NOFILE"):  # only Linux has limits that a process can ask for in this way
        return
    soft, hard = psutil.Process().rlimit(psutil.RLIMIT_NOFILE)
    wanted = 2 * _CONNECTIONS if hard == psutil.RLIM_INFINITY else min(2 * _CONNECTIONS, hard)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            psutil.Process().rlimit(psutil.RLIMIT_NOFILE, (wanted, hard))
