"""Which point of a run to keep: accuracy at every look of the gate, beside the quality that it sees. docs/gate.md.

    python -m benchmarks.looks BACKBONE IMAGES STEPS
    python -m benchmarks.looks tables

A run of `fast` whose mask is saved whenever quality is measured; every mask is then measured with labels, and is a line
of the log. Sets and weights are those of benchmarks/curve.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from selfmask.commands.outcome import Labelled, measure
from selfmask.data import open_images
from selfmask.embedding.embedder import Embedder, MaskVariants
from selfmask.evaluation.rows import COLUMNS
from selfmask.files import RunFile
from selfmask.masking import MaskedModel
from selfmask.memory import keep_memory

from .curve import Pair, backbone_for, points_gained, read, run, told

LOG = Path("docs/logs/looks.jsonl")
RUNS = Path("runs/looks")


def take(pair: Pair, steps: int) -> None:
    folder = RUNS / f"{pair}, {steps}".replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)

    def save(model: MaskedModel, line: Mapping[str, Any]) -> None:
        if "quality" in line:
            model.save_pretrained(folder / f"{line['step']}.smn")

    out = folder / "run"
    if not (out / RunFile.RESULT).exists():
        run(pair, {"steps": steps}, out=out, resume=out.exists(), watch=save)
    labelled = Labelled(*(open_images(pair.images, split=split) for split in ("train", "test")))
    for step, quality in ((each["step"], each["quality"]) for each in read(out / RunFile.LOG) if "quality" in each):
        model, preprocessing = backbone_for(pair)
        masked = MaskedModel.from_pretrained(model, folder / f"{step}.smn")
        rows = measure(Embedder("", masked, preprocessing, 0, variants=MaskVariants(masked)), labelled)["rows"]
        line = {**dataclasses.asdict(pair), "steps": steps, "step": step, "quality": quality, "rows": rows}
        with LOG.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(pair, step, f"{quality:.4f}", flush=True)


def show(of_log: Sequence[dict[str, Any]]) -> None:
    print("| pair | step | quality | " + " | ".join(COLUMNS.values()) + " | |")
    print("|" + " --- |" * (4 + len(COLUMNS)))
    for _, run_lines in groupby(of_log, lambda line: (line["backbone"], line["images"], line["steps"])):
        lines = list(run_lines)
        highest = max(lines, key=lambda line: line["quality"])
        for line in lines:
            gains = points_gained(line["rows"], "mask")
            words = "highest quality" if line is highest else ""
            pair = str(Pair(line["backbone"], line["images"])) if line is lines[0] else ""
            print(f"| {pair} | {line['step']} | {line['quality']:.4f} | " + " | ".join(told(gains)) + f" | {words} |")


def main() -> None:
    keep_memory()  # as the command line does
    match sys.argv[1:]:
        case ["tables"]:
            show(read(LOG))
        case [backbone, images, steps]:
            take(Pair(backbone, images), int(steps))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
