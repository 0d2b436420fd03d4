"""Does more time buy more? Runs of `adapt` with growing budgets, on pairs of a backbone and images: docs/budget.md.

    python -m benchmarks.curve plan [--only TEXT]                      how many steps a budget gives: on an idle machine
    python -m benchmarks.curve BUDGET [--only TEXT] [--seeds N]        BUDGET: 2m, 20m, 2h
    python -m benchmarks.curve BUDGET --method full|lora|bitfit        the same steps by another method
    python -m benchmarks.curve BUDGET --beside                         pairs that are no part of the means
    python -m benchmarks.curve tables [--log FILE] [--against FILE]    what the same runs gain more in another log

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, get_args

from torch import nn

from selfmask import AdaptConfig, AdaptResult, adapt
from selfmask.commands.adapt_config import AdaptMethod
from selfmask.commands.outcome import Labelled
from selfmask.data import open_images
from selfmask.evaluation.rows import COLUMNS
from selfmask.memory import keep_memory
from selfmask.preprocessing import Preprocessing
from selfmask.training.budget import LEAST_STEPS
from selfmask.training.config import seconds_of

from .gate import backbone_named

LOG = Path("docs/logs/curve.jsonl")
BEFORE = Path("docs/logs/curve-gates-before.jsonl")  # runs that an earlier gate ended at another point: docs/gate.md
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
    Pair("selfmask/vit", "selfmask/fashion"),
)
# ... and is run on these once, when it is done.
ONCE = (
    Pair("resnet18", "small-flowers"),
    Pair("tiny_vit", "small-emoji"),
    Pair("lite0", "small-dtd"),
    Pair("tiny_vit", "small-imagenette"),
)
PAIRS = (*LOOKED_AT, *ONCE)
CURVE = (*LOOKED_AT[:3], *ONCE[:2])  # the means are of these
BESIDE = (LOOKED_AT[4], *ONCE[2:])  # run as well, with --beside: in the tables, and not in their means


def backbone_for(pair: Pair) -> tuple[nn.Module, Preprocessing]:
    model, preprocessing = backbone_named(pair.backbone)
    if not pair.backbone.startswith("selfmask/"):
        preprocessing = dataclasses.replace(preprocessing, size=(64, 64))
    return model, preprocessing


def run(pair: Pair, settings: Mapping[str, Any], **of_adapt: Any) -> AdaptResult:
    """`fast` on this pair, with some settings changed."""
    model, preprocessing = backbone_for(pair)
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


Gains = dict[tuple[Pair, int], list[float]]
"""Of a pair and a seed: points above frozen in all columns, and then of both with the map."""


def show(lines: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]] = ()) -> None:
    """A table for each budget and method, with means over seeds, and what it adds to the budget before it."""
    of_masks: dict[str, Gains] = {}
    for method in get_args(AdaptMethod):
        before: Gains = {}
        for budget in (*BUDGETS, *{line["budget"] for line in lines if line["budget"] not in BUDGETS}):
            found, elsewhere = (
                [line for line in some if (line["budget"], method_of(line)) == (budget, method)]
                for some in (lines, others)
            )
            if not found:
                continue
            gains = _gains(found)
            _table(f"{budget}, {method}", found, gains)
            _compare("the same in the other log, more than this", _gains(elsewhere), gains)
            _compare("more than the budget before", gains, before)
            if method == "mask":
                of_masks[budget] = gains
            else:
                _compare("a mask, more than this", of_masks.get(budget, {}), gains)
            before = gains


def _gains(lines: Sequence[dict[str, Any]]) -> Gains:
    return {_key(line): points_gained(line["result"]["rows"], method_of(line)) for line in lines}


def _compare(what: str, these: Gains, those: Gains) -> None:
    """A row of how much higher these are, on the mean of the runs of the same pairs and seeds."""
    if shared := [each for each in these if each in those and each[0] not in BESIDE]:
        more = [[now - then for now, then in zip(these[key], those[key], strict=True)] for key in shared]
        print(_row([f"{what} (runs: {len(shared)})", "", "", "", ""], _means(more)))


def _key(line: Mapping[str, Any]) -> tuple[Pair, int]:
    return Pair(line["backbone"], line["images"]), line["seed"]


def _table(title: str, lines: Sequence[dict[str, Any]], gains: Gains) -> None:
    print(f"\n{title}: without a map, and with one\n")
    print("| " + " | ".join(["pair", "runs", "kept", "steps", "kB", *COLUMNS.values()]) + " |")
    print("|" + " --- |" * (5 + len(COLUMNS)))
    rows = []
    ran = dict.fromkeys(
        [*(pair for pair in PAIRS if any(each == pair for each, _ in gains)), *(each for each, _ in gains)]
    )
    for pair in sorted(ran, key=lambda each: each in BESIDE):
        results = [line["result"] for line in lines if Pair(line["backbone"], line["images"]) == pair]
        own = _means([own for (each, _), own in gains.items() if each == pair])
        rows += [] if pair in BESIDE else [own]
        stored = "mask_bytes" if method_of(lines[0]) == "mask" else "bytes"
        kept = sum(each["kept"] != "identity" for each in results)
        steps, size = (mean(each[key] for each in results) for key in ("steps", stored))
        print(_row([str(pair), str(len(results)), str(kept), f"{steps:,.0f}", f"{size / 1000:,.0f}"], own))
    if rows:
        print(_row([f"**mean of the first {len(rows)}**", "", "", "", ""], _means(rows)))


def points_gained(rows: Mapping[str, Mapping[str, float]], method: str) -> list[float]:
    """In all columns, over frozen, and then of both with the map."""
    return [100 * (rows[method + end][key] - rows["frozen" + end][key]) for end in ("", "+map") for key in COLUMNS]


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [mean(column) for column in zip(*rows, strict=True)]


def _row(cells: Sequence[str], gains: Sequence[float]) -> str:
    return "| " + " | ".join([*cells, *told(gains)]) + " |"


def told(gains: Sequence[float]) -> list[str]:
    half = len(gains) // 2
    return [f"{plain:+.1f}, {mapped:+.1f}" for plain, mapped in zip(gains[:half], gains[half:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("budget", choices=("plan", *BUDGETS, "tables"))
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--against", type=Path, help="another log")
    parser.add_argument("--only", default="", help="only pairs whose name holds this text")
    parser.add_argument("--beside", action="store_true", help="the pairs that are no part of the means")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--method", choices=get_args(AdaptMethod), default="mask")
    given = parser.parse_args()
    keep_memory()  # as the command line does
    if given.budget == "tables":
        show(read(given.log), read(given.against) if given.against else ())
        return
    if given.budget == "plan":
        for pair in PAIRS:
            if given.only in str(pair):
                plan(pair)
        return
    for seed in range(given.seeds):
        for pair in BESIDE if given.beside else CURVE:
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
