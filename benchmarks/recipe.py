"""How good was the first recipe of `fast`, and why: the runs behind docs/recipe.md.

    python -m benchmarks.recipe PART [--log FILE]   PART: demo, grid, ablation, elsewhere, reference, tables

Every run is one line of FILE (docs/logs/recipe.jsonl); runs that are there are not run again. `tables` prints what
docs/recipe.md shows and, of that log, draws its figures. The data sets are those of tools/small_sets.py, in the folder
that SELFMASK_DATA names; TINY_LABELLED names the weights of `selfmask pretrain --labels`.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from selfmask import AdaptConfig, MaskConfig, adapt
from selfmask.backbones import load_backbone
from selfmask.data import open_images
from selfmask.data.views import ViewsConfig
from selfmask.embedding.embedder import FROZEN, MASK, Embedder
from selfmask.embedding.vectors import embed
from selfmask.evaluation import few_label_probe, knn_accuracy
from selfmask.objectives.contrast import ContrastConfig

from .first_recipe import FIRST, for_backbone

LOG = Path("docs/logs/recipe.jsonl")
DEMO = "selfmask/tiny", "selfmask/fashion"
SEEDS = (0, 1, 2)
KNN = {"knn": 200, "knn_20": 20}  # the second is not in lines of earlier logs
SETS = ("small-mnist", "small-fashion", "small-cifar10", "small-digits")

# What it was without one of its parts.
WITHOUT: Mapping[str, Mapping[str, Any]] = {
    "contrast (SwAV instead)": {"objective": "swav", "head_lr": 0.15},
    "kinship": {"objective": ContrastConfig(kinship=0.0)},
    "anchored statistics (of the batch instead)": {"mask": MaskConfig(norm="adapt")},
    "anchored statistics (frozen instead)": {"mask": MaskConfig(norm="frozen")},
    "a rate per tensor (50 for all instead)": {"per_tensor": False, "lr": 50.0},
    "heads first": {"heads_first": 0.0},
    "gentle views (SwAV's instead)": {"views": dataclasses.replace(ViewsConfig(), small=0)},
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One adaptation: its place in the study, and its settings."""

    part: str
    name: str
    backbone: str
    images: str
    config: AdaptConfig
    size: int | None = None
    curve: int | None = None  # measure k-NN every so many steps

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.part, self.name, self.backbone, self.images, self.config.seed


def runs(part: str) -> Iterator[Run]:
    if part == "demo":
        for seed in SEEDS:
            yield Run(part, "fast", *DEMO, dataclasses.replace(FIRST, seed=seed))
    if part == "grid":
        for backbone in ("selfmask/tiny", "tiny with labels", "tf_efficientnet_lite0"):
            for images in SETS:
                size = 64 if backbone.startswith("tf") else None
                yield Run(part, "fast", backbone, images, FIRST, size)
    if part == "ablation":
        for seed in SEEDS:
            for name, changes in WITHOUT.items():
                yield Run(part, name, *DEMO, dataclasses.replace(FIRST, seed=seed, **changes))
    if part == "elsewhere":  # what does not help on the clothes has to show what it is for
        for seed in SEEDS:
            for name in ("fast", "kinship", "heads first"):
                config = dataclasses.replace(FIRST, seed=seed, **WITHOUT.get(name, {}))
                yield Run("ablation", name, "selfmask/tiny", "small-mnist", config)
        without = dataclasses.replace(FIRST, **WITHOUT["kinship"])
        yield Run("ablation", "kinship", "tf_efficientnet_lite0", "small-cifar10", without, 64)
    if part == "reference":
        assert FIRST.steps is not None
        reference = AdaptConfig.preset("reference", steps=10 * FIRST.steps, track=())
        yield Run(part, "reference", *DEMO, reference, curve=FIRST.steps // 2)


def perform(run: Run) -> dict[str, Any]:
    weights = os.environ["TINY_LABELLED"] if run.backbone == "tiny with labels" else None
    backbone = load_backbone("selfmask/tiny" if weights else run.backbone, weights=weights and Path(weights))
    train, test = (open_images(run.images, split=split) for split in ("train", "test"))
    preprocessing = backbone.preprocessing
    if run.size is not None:
        preprocessing = dataclasses.replace(preprocessing, size=(run.size, run.size))
    config = dataclasses.replace(for_backbone(run.config, backbone.model), size=run.size)
    y, truth = torch.tensor(train.labels), torch.tensor(test.labels)
    curve: list[dict[str, Any]] = []
    spent = 0.0

    def watch(masked: Any, line: Mapping[str, Any]) -> None:
        """k-NN at the points where quality is measured, before the gate chooses among them."""
        nonlocal spent
        wanted = line["step"] % run.curve == 0 if run.curve else "quality" in line
        if not wanted and line["step"] != config.steps:
            return
        start = time.perf_counter()
        (bank, kept), (queries, test_kept) = (embed(masked, images, preprocessing) for images in (train, test))
        parts = bank, y[kept], queries, truth[test_kept]
        point = {key: knn_accuracy(*parts, k=min(k, len(bank))) for key, k in KNN.items()}
        kept_of_line = {key: line[key] for key in ("step", "loss", "quality", "active", "trouble") if key in line}
        curve.append(kept_of_line | point)
        spent += time.perf_counter() - start

    def before_and_after(masked: Any) -> dict[str, float]:
        """What the log holds: k-NN, and a probe with 1 % of the labels."""
        numbers = {}
        for side, variant in (("before", FROZEN), ("after", MASK)):
            model = Embedder("", masked, preprocessing, 0).module([variant])
            (bank, kept), (queries, test_kept) = (embed(model, images, preprocessing) for images in (train, test))
            parts = bank, y[kept], queries, truth[test_kept]
            numbers |= {f"{key}_{side}": knn_accuracy(*parts, k=min(k, len(bank))) for key, k in KNN.items()}
            numbers[f"probe_{side}"] = few_label_probe(*parts, fraction=0.01)[0]
        return numbers

    start = time.perf_counter()
    result = adapt(
        backbone.model,
        run.images,
        config,
        preprocessing=preprocessing,
        watch=watch,
    )
    seconds = time.perf_counter() - start - spent
    return {
        **dict(zip(("part", "name", "backbone", "images", "seed"), run.key, strict=True)),
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "result": result.result | before_and_after(result.model),
        "curve": curve,
    }


def read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["demo", "grid", "ablation", "elsewhere", "reference", "tables"])
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--only", default="", help="only runs whose backbone, images and name hold this text")
    given = parser.parse_args()
    if given.part == "tables":
        from .recipe_tables import show

        show(read(given.log), figures=given.log == LOG)
        return
    for run in runs(given.part):
        done = {tuple(line[key] for key in ("part", "name", "backbone", "images", "seed")) for line in read(given.log)}
        if run.key in done or given.only not in f"{run.backbone} {run.images} {run.name}":
            continue
        line = perform(run)
        with given.log.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # several parts may run at once
            file.write(json.dumps(line) + "\n")
        numbers = line["result"]
        print(
            f"{' / '.join(map(str, run.key))}: k-NN {numbers['knn_before']:.4f} -> {numbers['knn_after']:.4f}, "
            f"probe {numbers['probe_before']:.4f} -> {numbers['probe_after']:.4f}, {numbers.get('kept', 'no gate')}, "
            f"{line['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
