"""The client of a load test: autocannon, in a process of its own; what it asks for, and what came back."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image
from sklearn.datasets import load_sample_images

SKEW = 1.0  # Zipf: the k-th most popular mask has a share in proportion to 1 / k
ONE, ZIPF, UNIFORM = "one mask", "Zipf", "uniform"
_LOAD = Path(__file__).with_name("load.js")


@dataclasses.dataclass(frozen=True)
class Sent:
    """What came of some requests: their rate, milliseconds, how many failed, and the CPU seconds that each took."""

    requests: int
    rate: float
    p50: float
    p99: float
    refused: int
    client: float
    server: float


def send(
    port: int,
    server: psutil.Process,
    images: list[str],
    orders: list[list[str]],
    *,
    amount: int,
    clients: int,
    rate: int | None = None,
) -> Sent:
    """So many requests, and not for a time: else some would be under way at its end."""
    spec: dict[str, Any] = {
        "url": f"http://127.0.0.1:{port}",
        "path": "/v1/embeddings",
        "connections": clients,
        "images": images,
        "orders": orders,
        "amount": amount,
        **({"rate": rate} if rate else {}),
    }
    before = sum(server.cpu_times()[:2])
    done = subprocess.run(["node", _LOAD], input=json.dumps(spec), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    used = sum(server.cpu_times()[:2]) - before
    count = max(1, found["requests"])
    return Sent(
        requests=found["requests"],
        rate=found["requests"] / found["seconds"],
        p50=found["p50"],
        p99=found["p99"],
        refused=found["refused"] + found["errors"],
        client=found["cpu"] / count,
        server=used / count,
    )


def traffic(what: str, names: list[str], clients: int, seed: int) -> list[list[str]]:
    """What each client asks for, in order."""
    random = np.random.default_rng(seed)
    if what == ONE:
        return [[names[0]] * 8]
    shares = 1 / np.arange(1, len(names) + 1) ** SKEW if what == ZIPF else np.ones(len(names))
    order = np.random.default_rng(0).permutation(names)  # popularity has nothing to do with how many weights are off
    return [random.choice(order, 500, p=shares / shares.sum()).tolist() for _ in range(clients)]


def each_once(names: list[str], clients: int) -> list[list[str]]:
    """Every name once, in equal parts; the last client may ask for some a second time."""
    return [names[number::clients] for number in range(clients)]


def photos(size: int) -> list[str]:
    """Parts of two real photographs, as JPEG files of the size, as data URIs."""
    found, random = [], np.random.default_rng(0)
    for number in range(8):
        whole = Image.fromarray(load_sample_images().images[number % 2])
        left, top = (int(random.integers(0, side - size)) for side in whole.size)
        file = io.BytesIO()
        whole.crop((left, top, left + size, top + size)).save(file, "JPEG", quality=90)
        found.append(f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}")
    return found
