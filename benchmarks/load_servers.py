"""The servers of a load test, each in a process of its own: `selfmask serve`, and a plain one to compare with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil


@contextmanager
def ours(backbone: str, size: int, folder: Path, options: Sequence[str] = ()) -> Iterator[tuple[psutil.Process, int]]:
    """`selfmask serve` of the masks and weights in a folder, and its port."""
    port = free_port()
    words = [sys.executable, "-m", "selfmask", "serve", "--backbone", backbone, "--port", port, "--size", size]
    words += ["--weights", folder / "weights.safetensors", "--masks", folder / "masks"]
    with _running([*map(str, words), *options], {}, port) as process:
        yield process, port


@contextmanager
def plain(backbone: str, size: int, folder: Path) -> Iterator[tuple[psutil.Process, int]]:
    port = free_port()
    own = {"MODEL": backbone, "WEIGHTS": folder / "weights.safetensors", "SIZE": size, "PORT": port}
    variables = {f"PLAIN_{name}": str(value) for name, value in own.items()}
    with _running([sys.executable, "-m", "benchmarks.plain_server"], variables, port) as process:
        yield process, port


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(command: list[str], variables: dict[str, str], port: int) -> Iterator[psutil.Process]:
    process = subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.DEVNULL)
    try:
        _until_healthy(process, port)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(90)


def _until_healthy(process: subprocess.Popen[Any], port: int) -> None:
    end = time.monotonic() + 180
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
                return
        except OSError:
            assert process.poll() is None, "the server did not start"
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.2)
