"""`python -m benchmarks.serve_soak`: ten minutes of load of all kinds, and the server's memory every ten seconds.

More masks than the server may keep in memory, asked for in Zipf's proportions by autocannon (see `serve_load`); beside
that, one thread sends what is refused (bodies that are no JSON, images that are none, masks that there are not), breaks
off connections, and replaces, truncates and removes a mask file. Memory counts as flat if its mean over the last
quarter is at most 3 % above that over the second: the first is for what grows once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from .load_client import ZIPF, photos, send, traffic
from .load_servers import ours
from .many_masks import prepared

LOG = Path("docs/logs/serve-soak.jsonl")
FLAT = 1.03
_EVERY = 10.0  # seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--masks", type=int, default=200)
    parser.add_argument("--memory", default="40M", help="for packed masks; fewer than there are")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("build/load"))
    parser.add_argument("--log", type=Path, default=LOG)
    asked = parser.parse_args()
    found = measured(asked)
    asked.log.parent.mkdir(parents=True, exist_ok=True)
    with asked.log.open("a") as log:
        log.write(json.dumps(found) + "\n")
    quarters = ", ".join(f"{each / 1e6:,.0f} MB" for each in found["quarters"])
    odd = sum(found["odd"].values())
    print(f"{found['requests']:,} vectors and {odd:,} requests of other kinds in {asked.minutes:g} minutes.")
    print(f"Memory, means of quarters: {quarters}; the last is {found['ratio']:.3f} of the second.")
    print(f"Open files at the start and at the end: {found['files']}; threads: {found['threads']}.")
    return 0 if found["ratio"] <= FLAT and not found["failed"] else 1


def measured(asked: argparse.Namespace) -> dict[str, Any]:
    folder = asked.folder / asked.backbone
    facts = prepared(folder, asked.backbone, asked.masks)
    images, over, sizes = photos(asked.size), threading.Event(), list[int]()
    loose = folder / "masks" / "loose.smn"
    with ours(asked.backbone, asked.size, folder, ["--memory", asked.memory, "--timeout", "5"]) as (server, port):
        odd = Odd(port, images[0], loose, (folder / "masks" / f"{facts.names[0]}.smn").read_bytes())
        threads = [
            threading.Thread(target=watch, args=(server, sizes, over)),
            threading.Thread(target=odd.run, args=(over,)),
        ]
        counts = [(server.num_fds(), server.num_threads())]
        for thread in threads:
            thread.start()
        requests, failed, end, turn = 0, 0, time.monotonic() + 60 * asked.minutes, 0
        try:
            while time.monotonic() < end:
                orders = traffic(ZIPF, facts.names, asked.clients, turn)
                sent = send(port, server, images, orders, amount=50 * asked.clients, clients=asked.clients)
                requests, failed, turn = requests + sent.requests, failed + sent.refused, turn + 1
        finally:
            over.set()
            for thread in threads:
                thread.join()
            loose.unlink(missing_ok=True)
        time.sleep(6)  # what was broken off is given up
        counts.append((server.num_fds(), server.num_threads()))
    quarter = max(1, len(sizes) // 4)
    quarters = [statistics.mean(sizes[start : start + quarter]) for start in range(0, 4 * quarter, quarter)]
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "backbone": asked.backbone,
        "size": asked.size,
        "masks": asked.masks,
        "minutes": asked.minutes,
        "load_at_end": os.getloadavg()[0],
        "requests": requests,
        "failed": failed + odd.unexpected,
        "odd": odd.counts,
        "memory": sizes,
        "quarters": quarters,
        "ratio": quarters[-1] / quarters[1],
        "files": [files for files, _ in counts],
        "threads": [threads for _, threads in counts],
    }


def watch(server: psutil.Process, sizes: list[int], over: threading.Event) -> None:
    while True:
        sizes.append(server.memory_info().rss)
        if over.wait(_EVERY):
            return


class Odd:
    """What is sent beside the load, and what was answered."""

    def __init__(self, port: int, image: str, loose: Path, mask: bytes) -> None:
        self.port, self.image, self.loose, self.mask = port, image, loose, mask
        self.counts, self.unexpected = Counter[str](), 0

    def run(self, over: threading.Event) -> None:
        turns = random.Random(0)
        while not over.wait(0.02):
            what = turns.choice(["no JSON", "no image", "no mask", "broken off", "file", "loose mask"])
            status = getattr(self, "_" + what.replace(" ", "_"))(turns)
            self.counts[f"{what}: {status}"] += 1
            self.unexpected += isinstance(status, int) and status >= 500

    def _post(self, body: bytes) -> int:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/embeddings", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def _no_JSON(self, turns: random.Random) -> int:  # noqa: N802
        return self._post(turns.randbytes(turns.randrange(1, 5000)))

    def _no_image(self, turns: random.Random) -> int:
        return self._post(json.dumps({"model": "frozen", "input": self.image[: turns.randrange(30, 400)]}).encode())

    def _no_mask(self, turns: random.Random) -> int:
        return self._post(json.dumps({"model": f"nobody-{turns.random()}", "input": self.image}).encode())

    def _loose_mask(self, turns: random.Random) -> int:
        return self._post(json.dumps({"model": "loose", "input": self.image}).encode())

    def _broken_off(self, turns: random.Random) -> str:
        body = json.dumps({"model": "frozen", "input": self.image}).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall((head + body)[: turns.randrange(len(head + body))])
        return "closed"

    def _file(self, turns: random.Random) -> str:
        how = turns.choice(["replaced", "truncated", "removed"])
        if how == "removed":
            self.loose.unlink(missing_ok=True)
        else:
            self.loose.write_bytes(self.mask if how == "replaced" else self.mask[: turns.randrange(len(self.mask))])
        return how


if __name__ == "__main__":
    sys.exit(main())
