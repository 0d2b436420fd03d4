"""Does more time buy more? Runs of `adapt` with growing budgets, on pairs of a backbone and images: docs/budget.md.

    python -m benchmarks.curve BUDGET [--only TEXT] [--seeds N] [--log FILE]   BUDGET: 2m, 20m, 2h
    python -m benchmarks.curve tables

Every run is one line of FILE (docs/logs/curve.jsonl); runs that are there are not run again. Nothing else may run
meanwhile: a budget is time. The sets are those of tools/small_sets.py and tools/photo_sets.py, in the folder that
SELFMASK_DATA names; weights are in the folder that SELFMASK_WEIGHTS names.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from selfmask import AdaptConfig, adapt
from selfmask.commands.outcome import Labelled
from selfmask.data import open_images
from selfmask.evaluation.rows import COLUMNS
from selfmask.memory import keep_memory

from .gate import backbone_named

LOG = Path("docs/logs/curve.jsonl")


@dataclasses.dataclass(frozen=True)
class Pair:
    backbone: str
    images: str

    def __str__(self) -> str:
        return f"{self.backbone}, {self.images.removeprefix('small-')}"


# The recipe was chosen on these...
LOOKED_AT = (
    Pair("selfmask/tiny", "selfmask/fashion"),
    Pair("resnet18", "small-imagenette"),
    Pair("lite0", "small-cifar10"),
    Pair("resnet18", "small-five"),
)
# ... and is run on these once, when it is done.
ONCE = (
    Pair("resnet18", "small-flowers"),
    Pair("tiny_vit", "small-emoji"),
    Pair("lite0", "small-dtd"),
    Pair("tiny_vit", "small-imagenette"),
)
CURVE = (*LOOKED_AT[:3], *ONCE[:2])


def perform(pair: Pair, budget: str, seed: int) -> dict[str, Any]:
    model, preprocessing = backbone_named(pair.backbone)
    if pair.backbone != "selfmask/tiny":
        preprocessing = dataclasses.replace(preprocessing, size=(64, 64))
    labelled = Labelled(*(open_images(pair.images, split=split) for split in ("train", "test")))
    config = AdaptConfig.preset("fast", budget=budget, seed=seed, track=(), size=preprocessing.size[0])
    done = adapt(model, pair.images, config, preprocessing=preprocessing, labelled=labelled, report=False)
    return {"backbone": pair.backbone, "images": pair.images, "budget": budget, "seed": seed, "result": done.result}


def read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def show(lines: Sequence[dict[str, Any]]) -> None:
    """Points above the frozen backbone, with the map on both sides in the columns that say so; means over seeds."""
    found: dict[tuple[str, Pair], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        found[line["budget"], Pair(line["backbone"], line["images"])].append(line["result"])
    columns = [(suffix, key) for suffix in ("", "+map") for key in COLUMNS]
    heads = [COLUMNS[key] + (", both mapped" if suffix else "") for suffix, key in columns]
    print("| budget | pair | runs | steps | kept | " + " | ".join(heads) + " |")
    print("|" + " --- |" * (5 + len(columns)))
    totals: dict[str, list[list[float]]] = defaultdict(list)
    for (budget, pair), results in found.items():
        gains = [
            100 * mean(r["rows"]["mask" + suffix][key] - r["rows"]["frozen" + suffix][key] for r in results)
            for suffix, key in columns
        ]
        totals[budget].append(gains)
        kept = sum(r["kept"] != "identity" for r in results)
        cells = [budget, str(pair), str(len(results)), f"{mean(r['steps'] for r in results):.0f}", str(kept)]
        print("| " + " | ".join([*cells, *(f"{gain:+.1f}" for gain in gains)]) + " |")
    for budget, rows in totals.items():
        means = [f"**{mean(column):+.1f}**" for column in zip(*rows, strict=True)]
        print("| " + " | ".join([budget, f"mean of {len(rows)}", "", "", "", *means]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("budget", help="a time such as 2m, or tables")
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--only", default="", help="only pairs whose name holds this text")
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    keep_memory()  # as the command line does
    if given.budget == "tables":
        show(read(given.log))
        return
    for seed in range(given.seeds):
        for pair in CURVE:
            key = pair.backbone, pair.images, given.budget, seed
            done = {tuple(line[name] for name in ("backbone", "images", "budget", "seed")) for line in read(given.log)}
            if key in done or given.only not in str(pair):
                continue
            line = perform(pair, given.budget, seed)
            with given.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(
                key, line["result"]["kept"], line["result"]["steps"], f"{line['result']['seconds']:.0f} s", flush=True
            )


if __name__ == "__main__":
    main()
