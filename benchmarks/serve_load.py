"""`python -m benchmarks.serve_load`: a server under load, with one mask and with a thousand.

The client is autocannon, in a process of its own on the same machine (`npm install autocannon`, and NODE_PATH set to
where it was put): its share of the CPU is printed. Every round measures all kinds of traffic one after the other, and
ratios are those of one round: the speed of a machine drifts. "By CPU" is the ratio of the CPU time that the server
spends on a request: what throughput would be if nothing else ran, and nobody waited.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_sample_images

from .many_masks import backbone, save_weights, write

SKEW = 1.0  # Zipf: the k-th most popular mask has a share in proportion to 1 / k
_LOAD = Path(__file__).with_name("load.js")


def main() -> int:
    asked = arguments()
    of = backbone(asked.backbone, asked.size)
    names = write(asked.folder / "masks", of, asked.masks)
    save_weights(of, asked.folder / "weights.safetensors")
    weights = sum(each.numel() for each in of.model.parameters())
    del of
    console = Console(width=140)
    console.print(
        f"{asked.backbone}, {asked.size} px, {asked.masks:,} masks, {asked.clients} clients, {asked.rounds} rounds of "
        f"{asked.requests:,} requests each; {os.cpu_count()} cores, load average at the start {os.getloadavg()[0]:.1f}"
    )
    table = Table(
        "traffic", "requests/s", "of one mask", "by CPU", "p50 ms", "p99 ms", "server's CPU a request", "client's"
    )
    with ours(asked) as server:
        before = server.memory_info().rss
        begin = time.monotonic()
        send(asked, server, [names], amount=len(names), clients=1)
        seconds, after = time.monotonic() - begin, server.memory_info().rss
        found: dict[str, list[Sent]] = {"one mask": [], "Zipf": [], "uniform": []}
        for turn in range(asked.rounds):
            for what, sent in found.items():
                sent.append(send(asked, server, traffic(what, names, asked.clients, turn)))
        peak = statistics.median(sent.rate for sent in found["Zipf"])
        paced = send(asked, server, traffic("Zipf", names, asked.clients, 99), rate=round(0.7 * peak))
        held = server.memory_info().rss
    with plain(asked) as rival:
        found["plain server, dense model"] = [
            send(asked, rival, traffic("one mask", names, asked.clients, turn)) for turn in range(asked.rounds)
        ]
    for what, sent in found.items():
        pairs = list(zip(sent, found["one mask"], strict=True))
        ratios = [each.rate / one.rate for each, one in pairs]
        table.add_row(
            what,
            f"{statistics.median(each.rate for each in sent):.1f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{statistics.median(one.server / each.server for each, one in pairs):.2f}",
            *(f"{statistics.median(getattr(each, key) for each in sent):.0f}" for key in ("p50", "p99")),
            *(f"{statistics.median(getattr(each, key) for each in sent) * 1e3:.1f} ms" for key in ("server", "client")),
        )
    table.add_row("Zipf, at 70 % of its rate", f"{paced.rate:.1f}", "", "", f"{paced.p50:.0f}", f"{paced.p99:.0f}")
    console.print(table)
    refused = sum(each.refused for sent in found.values() for each in sent)
    console.print(
        f"Refused or failed: {refused}. Memory: {before / 1e6:,.0f} MB at the start, {after / 1e6:,.0f} MB with "
        f"{len(names):,} masks read (in {seconds:.0f} s, with a vector of each), {held / 1e6:,.0f} MB at the end. "
        f"8 expanded models and a bit a weight of each mask are {(8 * 4 + len(names) / 8) * weights / 1e6:,.0f} MB."
    )
    return 0


@dataclasses.dataclass(frozen=True)
class Sent:
    """What came of some seconds of requests; of CPU, seconds that server and client spent on each."""

    rate: float
    p50: float
    p99: float
    refused: int
    client: float
    server: float


def send(
    asked: argparse.Namespace,
    server: psutil.Process,
    orders: list[list[str]],
    *,
    rate: int | None = None,
    amount: int = 0,
    clients: int | None = None,
) -> Sent:
    spec = {
        "url": f"http://127.0.0.1:{asked.port}",
        "path": "/v1/embeddings",
        "connections": clients or asked.clients,
        "images": photos(asked.size),
        "orders": orders,
        "amount": amount or asked.requests,  # and not a time: else some would be under way at its end
        **({"rate": rate} if rate else {}),
    }
    before = sum(server.cpu_times()[:2])
    done = subprocess.run(["node", _LOAD], input=json.dumps(spec), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    used = sum(server.cpu_times()[:2]) - before
    refused = found["refused"] + found["errors"]
    rated = found["requests"] / found["seconds"]
    count = max(1, found["requests"])
    return Sent(rated, found["p50"], found["p99"], refused, found["cpu"] / count, used / count)


def traffic(what: str, names: list[str], clients: int, seed: int) -> list[list[str]]:
    """What each client asks for, in order."""
    random = np.random.default_rng(seed)
    if what == "one mask":
        return [[names[0]] * 8]
    shares = 1 / np.arange(1, len(names) + 1) ** SKEW if what == "Zipf" else np.ones(len(names))
    order = np.random.default_rng(0).permutation(names)  # popularity has nothing to do with how many weights are off
    return [random.choice(order, 500, p=shares / shares.sum()).tolist() for _ in range(clients)]


def photos(size: int) -> list[str]:
    """Parts of two real photographs, as JPEG files of the size."""
    found, random = [], np.random.default_rng(0)
    for number in range(8):
        whole = Image.fromarray(load_sample_images().images[number % 2])
        left, top = (int(random.integers(0, side - size)) for side in whole.size)
        file = io.BytesIO()
        whole.crop((left, top, left + size, top + size)).save(file, "JPEG", quality=90)
        found.append(f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}")
    return found


@contextmanager
def ours(asked: argparse.Namespace) -> Iterator[psutil.Process]:
    words = [sys.executable, "-m", "selfmask", "serve", "--backbone", asked.backbone, "--port", asked.port]
    words += ["--weights", asked.folder / "weights.safetensors", "--masks", asked.folder / "masks"]
    with _running([*map(str, words), "--size", str(asked.size), *asked.options], {}, asked.port) as process:
        yield process


@contextmanager
def plain(asked: argparse.Namespace) -> Iterator[psutil.Process]:
    own = {"MODEL": asked.backbone, "WEIGHTS": asked.folder / "weights.safetensors", "SIZE": asked.size}
    variables = {f"PLAIN_{name}": str(value) for name, value in {**own, "PORT": asked.port}.items()}
    with _running([sys.executable, "-m", "benchmarks.plain_server"], variables, asked.port) as process:
        yield process


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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--masks", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2000, help="of each kind of traffic, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("load"), help="for masks and weights; they are kept")
    parser.add_argument("options", nargs="*", help="more options of `selfmask serve`, behind --")
    asked = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        asked.port = probe.getsockname()[1]
    return asked


if __name__ == "__main__":
    sys.exit(main())
