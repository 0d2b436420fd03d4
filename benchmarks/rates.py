"""Learning rates of methods that learn without labels, masks among them: the data behind docs/rivals.md.

    python -m benchmarks.rates METHOD RATE ... [--backbone NAME] [--images NAME] [--steps N]   (bundled by default)
    python -m benchmarks.rates tables

Every run is `fast` but for its method, rate and length; labels only measure. Every run is one line of the log, and none
is run twice. Backbones and sets are those of benchmarks/curve.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from selfmask.commands.adapt_config import AdaptMethod
from selfmask.commands.outcome import Labelled
from selfmask.data import open_images
from selfmask.evaluation.rows import COLUMNS
from selfmask.memory import keep_memory

from .curve import Pair, points_gained, read, run, told

LOG = Path("docs/logs/rates.jsonl")


def perform(pair: Pair, method: str, rate: float, steps: int) -> dict[str, Any]:
    labelled = Labelled(*(open_images(pair.images, split=split) for split in ("train", "test")))
    with tempfile.TemporaryDirectory() as folder:
        settings = {"method": method, "lr": rate, "steps": steps}
        result = run(pair, settings, out=Path(folder) / "run", labelled=labelled).result
    return {"backbone": pair.backbone, "images": pair.images, "rate": rate, "result": result}


def key_of(line: dict[str, Any]) -> tuple[Pair, str, int, float]:
    return Pair(line["backbone"], line["images"]), line["result"]["method"], line["result"]["steps"], line["rate"]


def show(lines: Sequence[dict[str, Any]]) -> None:
    """Points above frozen, and of both with the map, in a table for each pair."""
    order = sorted(lines, key=lambda line: (str(key_of(line)[0]), *key_of(line)[1:]))
    for pair, of_pair in groupby(order, lambda line: key_of(line)[0]):
        print(f"\n{pair}\n")
        print("| method | steps | rate | " + " | ".join(COLUMNS.values()) + " | gain / error | kept |")
        print("|" + " --- |" * (5 + len(COLUMNS)))
        for line in of_pair:
            _, method, steps, rate = key_of(line)
            result = line["result"]
            proof = f"{result['gain'] / result['gain_error']:.1f}" if result["gain_error"] else "-"
            cells = [method, str(steps), f"{rate:g}", *told(points_gained(result["rows"], method)), proof]
            print("| " + " | ".join([*cells, f"step {result['best_step']}"]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=(*get_args(AdaptMethod), "tables"))
    parser.add_argument("rates", type=float, nargs="*")
    parser.add_argument("--backbone", default="selfmask/tiny")
    parser.add_argument("--images", default="selfmask/fashion")
    parser.add_argument("--steps", type=int, default=240)
    given = parser.parse_args()
    keep_memory()  # as the command line does
    if given.method == "tables":
        show(read(LOG))
        return
    pair = Pair(given.backbone, given.images)
    for rate in given.rates:
        if (pair, given.method, given.steps, rate) in {key_of(line) for line in read(LOG)}:
            continue
        line = perform(pair, given.method, rate, given.steps)
        with LOG.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(pair, given.method, rate, line["result"]["kept"], f"{line['result']['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
