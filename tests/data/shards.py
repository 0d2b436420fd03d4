"""Shards of small pictures, and servers on this machine that give them out, well or badly."""

from __future__ import annotations

import io
import re
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from PIL import Image


def png(number: int, side: int = 24) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (side, side + number % 5, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def shards(folder: Path, count: int = 3, images: int = 10, *, labels: bool = False) -> Path:
    """`photos-000.tar` and so on; images are numbered through all of them."""
    for shard in range(count):
        members = {}
        for number in range(shard * images, (shard + 1) * images):
            members[f"{number:05d}.png"] = png(number)
            if labels:
                members[f"{number:05d}.cls"] = str(number % 2).encode()
        write_tar(folder / f"photos-{shard:03d}.tar", members)
    return folder


class Server(ThreadingHTTPServer):
    """Files of a folder, in ranges. `trouble` says what happens to requests of a file, the next ones first."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.trouble, self.asked = folder, dict[str, list[str]](), list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        name = self.path.lstrip("/")
        if "list-type=2" in self.path:  # S3: what else there is; nothing
            found = b"<KeyCount>0</KeyCount><IsTruncated>false</IsTruncated>"
            self._send(200, b"<ListBucketResult>" + found + b"</ListBucketResult>")
            return
        self.server.asked.append(f"{self.command} {name} {self.headers.get('Range', '')}".strip())
        waiting = self.server.trouble.get(name, [])
        trouble = waiting[0] if waiting and (body or waiting[0] == "403") else ""
        if trouble and trouble != "403" and len(waiting) > 1:
            waiting.pop(0)
        if trouble == "403" or not (self.server.folder / name).is_file():
            self._send(403 if trouble == "403" else 404, b"" if self.command == "HEAD" else b"<Error></Error>")
            return
        data = (self.server.folder / name).read_bytes()
        start, stop = 0, len(data)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and trouble != "no ranges":
            start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        self.send_header("ETag", f'"{hash(data)}"')
        self.end_headers()
        if body:
            part = data[start:stop]
            self.wfile.write(part[: len(part) // 2] if trouble == "half" else part)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing to the terminal."""


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
