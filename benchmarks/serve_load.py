"""`python -m benchmarks.serve_load run`: a server under load, with one mask and with a thousand; `tables` shows it.

The client is autocannon, in a process of its own on the same machine (`npm install autocannon`, and NODE_PATH set to
where it was put); its share of the CPU is measured. Every round measures all kinds of traffic one after the other, and
ratios are those of one round: the speed of a machine drifts. "By CPU" is the ratio of the CPU time that the server
spends on a request: what throughput would be if nothing else ran, and nobody waited.

Each backbone and size is one line of the log, written when all of it is measured; what is there is not measured again.
Masks and weights are kept in the folder, and serve all sizes of a backbone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .load_client import ONE, UNIFORM, ZIPF, Sent, each_once, photos, send, traffic
from .load_servers import ours, plain
from .load_tables import show
from .many_masks import Facts, prepared

LOG = Path("docs/logs/serve-load.jsonl")
HOT = 8  # of `--max-hot`
PLAIN = "plain"


def main() -> int:
    asked = arguments()
    if asked.what == "tables":
        show(read(asked.log))
        return 0
    done = {key(found) for found in read(asked.log)}
    for backbone in asked.backbones:
        for size in asked.sizes:
            if (backbone, size, asked.masks, asked.clients) in done:
                print(f"{backbone} at {size} px is there")
                continue
            begin = time.monotonic()
            found = measured(asked, backbone, size)
            asked.log.parent.mkdir(parents=True, exist_ok=True)
            with asked.log.open("a") as log:
                log.write(json.dumps(found) + "\n")
            print(f"{backbone} at {size} px took {time.monotonic() - begin:.0f} s")
    show(read(asked.log))
    return 0


def measured(asked: argparse.Namespace, backbone: str, size: int) -> dict[str, Any]:
    """One line of the log."""
    folder = asked.folder / backbone
    begin = time.monotonic()
    facts = prepared(folder, backbone, asked.masks)
    making = time.monotonic() - begin
    images, clients = photos(size), asked.clients
    load = os.getloadavg()[0]
    with ours(backbone, size, folder, asked.options) as (server, port):
        memory = Memory(server.memory_info, facts)

        def ask(orders: list[list[str]], amount: int, rate: int | None = None) -> Sent:
            return send(port, server, images, orders, amount=amount, clients=clients, rate=rate)

        ask([["frozen"]], 4 * clients)
        rough = ask([["frozen"]], 4 * clients).rate
        memory.note("start")
        begin = time.monotonic()
        reading = ask(each_once(facts.names, clients), len(facts.names))
        seconds = time.monotonic() - begin
        memory.note("all masks read")
        amount = max(8 * clients, round(rough * asked.seconds))
        found: dict[str, list[Sent]] = {ONE: [], ZIPF: [], UNIFORM: []}
        for turn in range(asked.rounds):
            for what, sent in found.items():
                sent.append(ask(traffic(what, facts.names, clients, turn), amount))
        peak = statistics.median(sent.rate for sent in found[ZIPF])
        pace = max(1, round(0.7 * peak))
        paced = ask(traffic(ZIPF, facts.names, clients, 99), max(4 * clients, round(pace * asked.seconds)), pace)
        memory.note("end")
    with plain(backbone, size, folder) as (rival, port):

        def ask_plain(amount: int) -> Sent:
            return send(port, rival, images, [["any"]], amount=amount, clients=clients)

        ask_plain(4 * clients)
        found[PLAIN] = [ask_plain(amount) for _ in range(asked.rounds)]
    return {
        "backbone": backbone,
        "size": size,
        "masks": asked.masks,
        "clients": clients,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load_at_start": load,
        "options": asked.options,
        "making_s": making,
        "reading_s": seconds,
        "reading": dataclasses.asdict(reading),
        "sent": {what: [dataclasses.asdict(each) for each in sent] for what, sent in found.items()},
        "paced": {"pace": pace, **dataclasses.asdict(paced)},
        "memory": memory.noted,
        "memory_bound": memory.bound,
    }


class Memory:
    """What a server holds at some moments, and what it may hold more than at the start.

    The start is after some seconds of load without a mask: one expanded model, and what its layers work in. With all
    masks read, it may be `HOT` expanded models more, and for each mask a bit a weight and its statistics.
    """

    def __init__(self, info: Callable[[], Any], facts: Facts) -> None:
        self._info, self.noted = info, dict[str, int]()
        self.bound = HOT * facts.model_bytes + len(facts.names) * (facts.bit_bytes + facts.statistics_bytes)

    def note(self, when: str) -> None:
        self.noted[when] = self._info().rss


def key(found: dict[str, Any]) -> tuple[object, ...]:
    return found["backbone"], found["size"], found["masks"], found["clients"]


def read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "tables"])
    parser.add_argument("--backbones", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 224])
    parser.add_argument("--masks", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="that one mask takes, in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/load"), help="for masks and weights; they are kept")
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--options", nargs="*", default=[], help="more options of `selfmask serve`: give them last")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
