"""`python -m benchmarks.serve_ray`: two Ray nodes on this machine, and one of them killed under load.

Each node has one replica of `selfmask.serving.ray:app`, with the bundled backbone. Clients ask for vectors of many
masks all the time; after some seconds all processes of one node are killed (SIGKILL), and the clients go on. Every
vector is compared with that of `selfmask embed`. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import torch
from tests.serving.served import BACKBONE, ask, offline, photo, save_masks, vectors_of

from .load_servers import free_port

PHOTOS = [photo(number) for number in range(8)]
# A machine that does much else takes longer to start a process than Ray waits for it: all the more as Ray
# lets its workers be nice to others, which is turned off below.
PATIENT = ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S")


class Load:
    """Clients that go on asking, and what came of it."""

    def __init__(self, port: int, folder: Path, names: list[str]) -> None:
        self.right = {name: offline(folder / f"{name}.smn", PHOTOS, batch_size=1) for name in names}
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        self.names, self.over = names, threading.Event()
        self.killed: float | None = None
        self.counts: dict[str, Counter[str]] = {"before": Counter(), "after": Counter()}
        self.places: dict[str, Counter[str]] = defaultdict(Counter)
        self.good: list[float] = []  # when answers came
        self.bad: list[float] = []

    def run(self, seed: int) -> None:
        turns = random.Random(seed)
        while not self.over.is_set():
            name, number = turns.choice(self.names), turns.randrange(len(PHOTOS))
            what = self._one(name, number)
            self.counts["before" if self.killed is None else "after"][what] += 1
            (self.good if what == "right" else self.bad).append(time.monotonic())

    def go_on(self, seconds: float) -> None:
        """Wait so long, and until every mask was asked for some times: a busy machine takes longer."""
        begin, before = time.monotonic(), len(self.good)
        while time.monotonic() - begin < (seconds if len(self.good) - before > 10 * len(self.names) else 20 * seconds):
            time.sleep(0.1)

    def _one(self, name: str, number: int) -> str:
        try:
            answer = ask(self.client, name, PHOTOS[number])
        except httpx2.HTTPError as error:
            return type(error).__name__
        if answer.status_code != 200:
            return str(answer.status_code)
        if self.killed is None:
            self.places[name][answer.headers["x-selfmask-replica"]] += 1
        return "right" if torch.allclose(vectors_of(answer)[0], self.right[name][number], atol=1e-5) else "wrong"

    @property
    def stayed(self) -> float:
        """The share of requests, before the kill, that the mask's usual replica answered."""
        return sum(max(each.values()) for each in self.places.values()) / sum(
            each.total() for each in self.places.values()
        )

    @property
    def gap(self) -> float:
        """Seconds from the kill to the last answer that failed; 0 if none did."""
        assert self.killed is not None
        return max([when - self.killed for when in self.bad if when > self.killed], default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="with 1, nothing is killed")
    parser.add_argument("--masks", type=int, default=12)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0, help="of load before the kill, and as long after it")
    parser.add_argument("--log", type=Path, help="where to add the result as a line")
    asked = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(asked, Path(folder))
    found["took_s"] = round(time.monotonic() - begin, 1)
    print(json.dumps(found))
    if asked.log is not None:
        with asked.log.open("a") as log:
            log.write(json.dumps(found) + "\n")
    return 0 if not found["wrong"] and found["good_at_the_end"] else 1


def measured(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"} | dict.fromkeys(PATIENT, "120")
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from selfmask.serving.ray import app

    names, port = save_masks(folder, asked.masks), free_port()
    own: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=own)
    own.pop("include_dashboard")
    others = [cluster.add_node(**own) for _ in range(asked.nodes - 1)]
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(app({"backbone": BACKBONE, "masks": str(folder), "replicas": str(asked.nodes)}))
        load = Load(port, folder, names)
        with ThreadPoolExecutor(asked.clients) as pool:
            clients = [pool.submit(load.run, seed) for seed in range(asked.clients)]
            try:
                load.go_on(asked.seconds)
                load.killed = time.monotonic()
                for node in others[:1]:
                    cluster.remove_node(node, allow_graceful=False)
                load.go_on(asked.seconds)
            finally:
                load.over.set()
            for each in clients:
                each.result()
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
    return {
        "nodes": asked.nodes,
        "masks": asked.masks,
        "clients": asked.clients,
        "ray": ray.__version__,
        "before": load.counts["before"],
        "after": load.counts["after"],
        "wrong": sum(each["wrong"] for each in load.counts.values()),
        "replicas_before": len({place for each in load.places.values() for place in each}),
        "stayed_on_their_replica": round(load.stayed, 3),
        "last_failure_after_the_kill_s": round(load.gap, 2),
        "good_at_the_end": bool(load.good) and (not load.bad or max(load.good) > max(load.bad)),
    }


if __name__ == "__main__":
    sys.exit(main())
