"""Does more time buy more? Runs of `adapt` with growing budgets, on pairs of a backbone and images: docs/budget.md.

    python -m benchmarks.curve plan [--only TEXT]                      how many steps a budget gives: on an idle machine
    python -m benchmarks.curve BUDGET [--only TEXT] [--seeds N]        BUDGET: 2m, 20m, 2h
    python -m benchmarks.curve BUDGET --method full|lora|bitfit        the same steps by another method
    python -m benchmarks.curve tables

A budget is time, so how many steps it gives is asked of an idle machine, by dry runs of `adapt`, and kept. The runs
take that many steps, however long they take beside other work: several at once, or stopped and started again, since
what they learn depends on the number of steps alone. Every run is one line of the log, and none is run twice.

The sets are those of tools/small_sets.py and tools/photo_sets.py, in the folder that SELFMASK_DATA names; weights are
in the folder that SELFMASK_WEIGHTS names.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, get_args

from selfmask import AdaptConfig, AdaptResult, adapt
from selfmask.commands.adapt_config import AdaptMethod
from selfmask.commands.outcome import Labelled
from selfmask.data import open_images
from selfmask.evaluation.rows import COLUMNS
from selfmask.memory import keep_memory
from selfmask.training.budget import LEAST_STEPS
from selfmask.training.config import seconds_of

from .gate import backbone_named

LOG = Path("docs/logs/curve.jsonl")
STEPS = Path("docs/logs/curve-steps.json")
RUNS = Path("runs/curve")
BUDGETS = ("2m", "20m", "2h")
TRIES = 3  # measures of speed


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
PAIRS = (*LOOKED_AT, *ONCE)
CURVE = (*LOOKED_AT[:3], *ONCE[:2])


def run(pair: Pair, settings: Mapping[str, Any], **of_adapt: Any) -> AdaptResult:
    """`fast` on this pair, with some settings changed."""
    model, preprocessing = backbone_named(pair.backbone)
    if pair.backbone != "selfmask/tiny":
        preprocessing = dataclasses.replace(preprocessing, size=(64, 64))
    config = AdaptConfig.preset("fast", track=(), size=preprocessing.size[0], **settings)
    return adapt(model, pair.images, config, preprocessing=preprocessing, report=False, **of_adapt)


def perform(pair: Pair, budget: str, seed: int, method: str) -> dict[str, Any]:
    if str(pair) not in planned():
        raise SystemExit(f"how many steps {budget} gives is not known: run `python -m benchmarks.curve plan` first")
    steps = planned()[str(pair)][budget]
    out = RUNS / f"{pair}, {budget}, {seed}, {method}".replace("/", "-")
    labelled = Labelled(*(open_images(pair.images, split=split) for split in ("train", "test")))
    settings = {"steps": steps, "seed": seed, "method": method}
    result = run(pair, settings, out=out, resume=out.exists(), labelled=labelled).result
    return {"backbone": pair.backbone, "images": pair.images, "budget": budget, "seed": seed, "result": result}


def planned() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(STEPS.read_text()) if STEPS.exists() else {}
    return found


def plan(pair: Pair) -> None:
    """The steps of all budgets by one measure of speed, the median of some: the machine may have been disturbed."""
    found = [run(pair, {"steps": LEAST_STEPS}, dry_run=True).result for _ in range(TRIES)]
    each = median(one["seconds_per_step"] for one in found)
    besides = median(one["seconds"] - one["steps"] * one["seconds_per_step"] for one in found)
    steps = {budget: max(LEAST_STEPS, int((seconds_of(budget) - besides) / each)) for budget in BUDGETS}
    print(pair, steps, f"{each:.3f} s a step", flush=True)
    STEPS.write_text(json.dumps(planned() | {str(pair): steps}, indent=1) + "\n")


def read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def method_of(line: Mapping[str, Any]) -> str:
    return str(line["result"]["method"])


def show(lines: Sequence[dict[str, Any]]) -> None:
    """Points above the frozen backbone, with the map on both sides in the columns that say so; means over seeds."""
    found: dict[tuple[str, str, Pair], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        found[line["budget"], method_of(line), Pair(line["backbone"], line["images"])].append(line["result"])
    columns = [(suffix, key) for suffix in ("", "+map") for key in COLUMNS]
    heads = [COLUMNS[key] + (", both mapped" if suffix else "") for suffix, key in columns]
    print("| budget | method | pair | runs | steps | kept | bytes | " + " | ".join(heads) + " |")
    print("|" + " --- |" * (7 + len(columns)))
    totals: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for (budget, method, pair), results in found.items():
        gains = [
            100 * mean(r["rows"][method + suffix][key] - r["rows"]["frozen" + suffix][key] for r in results)
            for suffix, key in columns
        ]
        totals[budget, method].append(gains)
        kept = sum(r["kept"] != "identity" for r in results)
        stored = "mask_bytes" if method == "mask" else "bytes"
        steps, size = (mean(r[key] for r in results) for key in ("steps", stored))
        cells = [budget, method, str(pair), str(len(results)), f"{steps:.0f}", str(kept), f"{size:,.0f}"]
        print("| " + " | ".join([*cells, *(f"{gain:+.1f}" for gain in gains)]) + " |")
    for (budget, method), rows in totals.items():
        means = [f"**{mean(column):+.1f}**" for column in zip(*rows, strict=True)]
        print("| " + " | ".join([budget, method, f"mean of {len(rows)}", "", "", "", "", *means]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("budget", choices=("plan", *BUDGETS, "tables"))
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--only", default="", help="only pairs whose name holds this text")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--method", choices=get_args(AdaptMethod), default="mask")
    given = parser.parse_args()
    keep_memory()  # as the command line does
    if given.budget == "tables":
        show(read(given.log))
        return
    if given.budget == "plan":
        for pair in PAIRS:
            if given.only in str(pair):
                plan(pair)
        return
    for seed in range(given.seeds):
        for pair in CURVE:
            key = pair.backbone, pair.images, given.budget, seed, given.method
            done = {
                (*(line[name] for name in ("backbone", "images", "budget", "seed")), method_of(line))
                for line in read(given.log)
            }
            if key in done or given.only not in str(pair):
                continue
            line = perform(pair, given.budget, seed, given.method)
            with given.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(
                key, line["result"]["kept"], line["result"]["steps"], f"{line['result']['seconds']:.0f} s", flush=True
            )


if __name__ == "__main__":
    main()
