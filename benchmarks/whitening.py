"""Which power of whitening, chosen how, from how many images and in how many bits: the data behind docs/whitening.md.

    python -m benchmarks.whitening measure FOLDER [--only TEXT]   (FOLDER keeps the vectors)
    python -m benchmarks.whitening tables

Every pair of a frozen backbone and a data set is one line of docs/logs/whitening.jsonl; pairs that are there are not
measured again. Data sets are those of tools/small_sets.py and tools/photo_sets.py, in the folder that SELFMASK_DATA
names; weights are in the folder that SELFMASK_WEIGHTS names. Pairs are split into those that a criterion was chosen on
and those that it was then checked on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfmask import FeatureMap
from selfmask.data import open_images
from selfmask.data.distortions import distorted
from selfmask.data.pixels import fit, normalised
from selfmask.data.sources import SomeImages
from selfmask.embedding.vectors import embed
from selfmask.evaluation import knn_accuracy, linear_probe, nearest
from selfmask.evaluation.feature_map import sample
from selfmask.evaluation.moments import Moments
from selfmask.evaluation.rows import few_per_class
from selfmask.evaluation.whitening import DIRECTIONS, directions, scales, shrinkage, shrunk

from .gate import backbone_named

LOG = Path("docs/logs/whitening.jsonl")
PAIRS = {
    "choose": [
        ("selfmask/tiny", "fashion"),
        ("selfmask/tiny", "mnist"),
        ("lite0", "cifar10"),
        ("resnet18", "five"),
        ("resnet18", "dtd"),
    ],
    "check": [
        ("selfmask/tiny", "digits"),
        ("selfmask/tiny", "cifar10"),
        ("lite0", "fashion"),
        ("lite0", "imagenette"),
        ("resnet18", "flowers"),
        ("resnet18", "imagenette"),
        ("resnet18", "emoji"),
    ],
}
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
FLOORS = (1e-6, 1e-3, 0.1)
HELD_OUT, COPIES, NEIGHBOURS, SEEDS, FEW_IMAGES = 256, 2, 20, 3, 300
Mapped = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Of training and test images with their labels, and of copies of some training images, which maps do not see."""

    train: Tensor
    labels: Tensor
    test: Tensor
    truth: Tensor
    held_out: list[int]
    copies: Tensor
    """[copies, held out, width]"""

    @property
    def others(self) -> Tensor:
        rest = torch.ones(len(self.train), dtype=torch.bool)
        rest[self.held_out] = False
        return self.train[rest]


def vectors_of(backbone: str, images: str, folder: Path) -> Vectors:
    file = folder / f"{backbone.replace('/', '_')}--{images}.pt"
    if file.exists():
        return Vectors(**torch.load(file, weights_only=True))
    model, preprocessing = backbone_named(backbone)
    model.eval()
    train, test = (open_images(f"small-{images}", split=split) for split in ("train", "test"))
    (own, kept), (other, test_kept) = (embed(model, part, preprocessing) for part in (train, test))
    chosen = sorted(sample(len(kept))[:: max(1, len(kept) // HELD_OUT)][:HELD_OUT])
    some = SomeImages(train, [kept[row] for row in chosen])
    clean = torch.stack([fit(some[number], preprocessing) for number in range(len(some))]).float() / 255
    copies, _ = distorted(clean, COPIES, torch.Generator().manual_seed(0))
    flat = normalised(255 * copies.flatten(0, 1), preprocessing)
    with torch.inference_mode():
        copied = torch.cat([model(part).float() for part in flat.split(64)]).clone()
    labels, truth = torch.tensor(train.labels)[kept], torch.tensor(test.labels)[test_kept]
    found = Vectors(own, labels, other, truth, chosen, copied.view(*copies.shape[:2], -1))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({field.name: getattr(found, field.name) for field in dataclasses.fields(found)}, file)
    return found


# ---- measures -------------------------------------------------------------------------------------------------------


def with_labels(vectors: Vectors, mapped: Mapped) -> dict[str, float]:
    train, test, y, truth = mapped(vectors.train), mapped(vectors.test), vectors.labels, vectors.truth
    few = [few_per_class(y.tolist(), seed) for seed in range(SEEDS)]
    return {
        "knn": knn_accuracy(train, y, test, truth, k=20),
        "knn_200": knn_accuracy(train, y, test, truth, k=min(200, len(train))),
        "probe_few": statistics.mean(linear_probe(train[some], y[some], test, truth) for some in few),
        "probe": linear_probe(train, y, test, truth),
    }


def without_labels(vectors: Vectors, mapped: Mapped) -> dict[str, float]:
    """What could choose a power: each is higher where it would be better."""
    bank, own = mapped(vectors.others), mapped(vectors.train[vectors.held_out])
    copies = mapped(vectors.copies.flatten(0, 1))
    unit, others = F.normalize(own, dim=1), F.normalize(copies, dim=1).view(COPIES, len(own), -1)
    similarity = others @ unit.T
    right = torch.arange(len(own)).expand(COPIES, -1)
    own_similarity = similarity.diagonal(dim1=1, dim2=2)
    apart = similarity.mean(2), similarity.std(2)
    near, near_copies = nearest(bank, own, NEIGHBOURS), nearest(bank, copies, NEIGHBOURS).view(COPIES, len(own), -1)
    shared = (near_copies[..., :, None] == near[None, :, None, :]).any(-1).float().mean()
    return {
        "recognised": float(F.log_softmax(similarity / 0.1, dim=2).diagonal(dim1=1, dim2=2).mean()),
        "first": float((similarity.argmax(2) == right).float().mean()),
        "margin": float(((own_similarity - apart[0]) / apart[1]).mean()),
        "neighbours": float(shared),
    }


class Spread:
    """Moments of vectors, for maps in other bits than ours, or with a floor under variances instead of shrinkage."""

    def __init__(self, rows: Tensor) -> None:
        self.moments = Moments(rows.shape[1])
        self.moments.add(rows)
        self.covariance = self.moments.covariance()
        self.found = self.moments.principal(rows.shape[1], self.covariance)

    def map(self, power: float, floor: float | None = None, bits: int = 64) -> Mapped:
        variances, axes = self.found.variances, self.found.vectors
        if bits < 64:
            steps = axes.abs().amax(0) / (2 ** (bits - 1) - 1)
            axes = (axes / steps).round() * steps
            variances = (axes * (self.covariance @ axes)).sum(0)
        if floor is None:
            variances = shrunk(variances, shrinkage(variances, self.moments.count))
        else:
            variances = variances + floor * variances.mean()
        matrix = axes * scales(variances, power)
        return lambda vectors: ((vectors.double() - self.moments.mean) @ matrix).float()


def knn(vectors: Vectors, mapped: Mapped) -> float:
    return knn_accuracy(mapped(vectors.train), vectors.labels, mapped(vectors.test), vectors.truth, k=20)


def measured(vectors: Vectors) -> dict[str, Any]:
    whole = FeatureMap.fit(vectors.train)
    held = FeatureMap.fit(vectors.others)
    few = vectors.train[torch.randperm(len(vectors.train), generator=torch.Generator().manual_seed(1))[:FEW_IMAGES]]
    small, spread, of_few = FeatureMap.fit(few), Spread(vectors.train), Spread(few)
    return {
        "images": len(vectors.train),
        "width": vectors.train.shape[1],
        "bytes": len(whole.as_bytes()),
        "directions": {str(power): directions(whole.variances.double(), power) for power in POWERS},
        "frozen": with_labels(vectors, lambda rows: rows),
        "powers": {
            str(power): with_labels(vectors, whole.at(power)) | {"without": without_labels(vectors, held.at(power))}
            for power in POWERS
        },
        "bits": {
            f"{bits} {power}": knn(vectors, spread.map(power, bits=bits)) for bits in (64, 6, 4) for power in (0.5, 1.0)
        },
        "few images": {str(power): knn(vectors, small.at(power)) for power in (0.5, 1.0)},
        "floors": {
            f"{floor} {power}": knn(vectors, of_few.map(power, floor)) for floor in FLOORS for power in (0.5, 1.0)
        },
    }


# ---- tables ---------------------------------------------------------------------------------------------------------

MEASURES = ("knn", "probe_few", "probe")
CRITERIA = ("recognised", "first", "margin", "neighbours")


def picked(line: dict[str, Any], criterion: str) -> float:
    return max(POWERS, key=lambda power: line["powers"][str(power)]["without"][criterion])


def few_directions(line: dict[str, Any]) -> float:
    """As the library chooses."""
    return max((power for power in (0.25, 0.5) if line["directions"][str(power)] <= DIRECTIONS), default=0.0)


def tables(lines: list[dict[str, Any]]) -> Iterator[str]:
    yield "\nk-NN (k = 20) / probe (10 labels a class) / probe (all labels)\n"
    yield "| | pair | frozen | " + " | ".join(f"power {power:g}" for power in POWERS) + " |"
    yield "|---" * (3 + len(POWERS)) + "|"
    for line in lines:
        numbers = [line["frozen"], *(line["powers"][str(power)] for power in POWERS)]
        cells = [" / ".join(f"{100 * each[measure]:.1f}" for measure in MEASURES) for each in numbers]
        yield f"| {line['part']} | {line['backbone']}, {line['images_of']} | {' | '.join(cells)} |"
    yield "\nGain over frozen in points, of the power that a criterion picks: k-NN, 10 labels a class, all labels\n"
    yield "| | criterion | picks | k-NN | 10 labels | all labels | worst |"
    yield "|---" * 7 + "|"
    for part in PAIRS:
        own = [line for line in lines if line["part"] == part]
        rules: dict[str, Callable[[dict[str, Any]], float]] = {
            **{f"always {power:g}": lambda _, power=power: power for power in POWERS},
            **{name: lambda line, name=name: picked(line, name) for name in CRITERIA},
            f"directions <= {DIRECTIONS} (auto)": few_directions,
            "best k-NN (with labels)": lambda line: max(POWERS, key=lambda p: line["powers"][str(p)]["knn"]),
        }
        for name, rule in rules.items():
            picks = [rule(line) for line in own]
            gains = {
                measure: [
                    100 * (line["powers"][str(power)][measure] - line["frozen"][measure])
                    for line, power in zip(own, picks, strict=True)
                ]
                for measure in MEASURES
            }
            means = " | ".join(f"{statistics.mean(each):+.1f}" for each in gains.values())
            worst = min(min(each) for each in gains.values())
            listed = ", ".join(f"{power:g}" for power in picks)
            yield f"| {part} | {name} | {listed} | {means} | {worst:+.1f} |"
    yield "\nBits and numbers of images: k-NN (k = 20) with power 0.5 / 1\n"
    few = [f"of {FEW_IMAGES}: ours", *(f"of {FEW_IMAGES}: floor {floor:g}" for floor in FLOORS)]
    yield "| pair | width | bytes | ours (8 bits) | 64 bits | 6 bits | 4 bits | " + " | ".join(few) + " |"
    yield "|---" * (7 + len(few)) + "|"
    for line in lines:

        def both(numbers: dict[str, float], before: str = "") -> str:
            return " / ".join(f"{100 * numbers[f'{before}{power}']:.1f}" for power in (0.5, 1.0))

        cells = [
            both({power: numbers["knn"] for power, numbers in line["powers"].items()}),
            *(both(line["bits"], f"{bits} ") for bits in (64, 6, 4)),
            both(line["few images"]),
            *(both(line["floors"], f"{floor} ") for floor in FLOORS),
        ]
        yield f"| {line['backbone']}, {line['images_of']} | {line['width']} | {line['bytes']:,} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["measure", "tables"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("vectors"))
    parser.add_argument("--only", default="", help="only pairs whose names hold this text")
    parser.add_argument("--log", type=Path, default=LOG)
    given = parser.parse_args()

    def logged() -> list[dict[str, Any]]:
        return [json.loads(line) for line in given.log.read_text().splitlines()] if given.log.exists() else []

    if given.part == "tables":
        print("\n".join(tables(logged())))
        return
    for part, pairs in PAIRS.items():
        for backbone, images in pairs:
            known = {(line["backbone"], line["images_of"]) for line in logged()}
            if (backbone, images) in known or given.only not in f"{backbone} {images}":
                continue
            numbers = measured(vectors_of(backbone, images, given.folder))
            with given.log.open("a") as file:
                file.write(json.dumps({"part": part, "backbone": backbone, "images_of": images, **numbers}) + "\n")
            print(
                part, backbone, images, {p: round(100 * n["knn"], 1) for p, n in numbers["powers"].items()}, flush=True
            )


if __name__ == "__main__":
    main()
