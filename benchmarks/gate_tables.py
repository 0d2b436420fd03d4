"""What a gate could look at, and what ours decides, for each point of benchmarks.gate: the tables of docs/gate.md.

python -m benchmarks.gate_tables measure FOLDER   a line of docs/logs/gate.jsonl for each new point in FOLDER
python -m benchmarks.gate_tables                  the tables, from those lines
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_mutual_info_score
from torch import Tensor

from selfmask.data.distortions import DISTORTIONS
from selfmask.training.quality import LEAST, MISTAKES, TEMPERATURE, Gain, as_quality, recognised, scored, similarities

LOG = Path("docs/logs/gate.jsonl")
OLD_NAMES = ("noise", "blur", "rotate", "cut", "shift", "grey", "dim")  # in files of points
LOOKS, NEIGHBOURS = 2, 20
Vectors = Mapping[str, Tensor]


def other(vectors: Vectors) -> Tensor:
    """The vectors of images under all distortions that are none of the training's, [kinds, n, d]."""
    names = [
        each.__name__ if each.__name__ in vectors else old for each, old in zip(DISTORTIONS, OLD_NAMES, strict=True)
    ]
    return torch.stack([vectors[name].double() for name in names])


def views(vectors: Vectors) -> Tensor:
    return torch.stack([vectors[name].double() for name in ("views", "views again")])


# ---- candidates: higher is better ------------------------------------------------------------------------------------


def whitened(images: Tensor, copies: Tensor, power: float) -> tuple[Tensor, Tensor]:
    mean = images.mean(0)
    _, spread, axes = torch.linalg.svd(images - mean, full_matrices=False)
    variance = spread.square() / len(images)
    scale = (variance + 0.1 * variance.mean()) ** (-power / 2)
    scale = torch.where(variance > 1e-12 * variance.max(), scale, 0.0)
    placed = (F.normalize((part - mean) @ axes.mT * scale, dim=-1) for part in (images, copies))
    return next(placed), next(placed)


def recognition(power: float, copies: Callable[[Vectors], Tensor]) -> Callable[[Vectors, Vectors], float]:
    def measure(vectors: Vectors, _: Vectors) -> float:
        images, seen = whitened(vectors["clean"].double(), copies(vectors), power)
        return float(F.log_softmax(seen @ images.mT / TEMPERATURE, -1).diagonal(dim1=1, dim2=2).mean())

    return measure


def neighbours(power: float, copies: Callable[[Vectors], Tensor], frozen: bool) -> Callable[[Vectors, Vectors], float]:
    """Of the neighbours of each image, by the model itself or the frozen one, the share found from distorted copies."""

    def nearest(vectors: Vectors) -> Tensor:
        images, _ = whitened(vectors["clean"].double(), vectors["clean"].double()[None], power)
        return (images @ images.mT).fill_diagonal_(-2).topk(NEIGHBOURS).indices

    def measure(vectors: Vectors, before: Vectors) -> float:
        images, seen = whitened(vectors["clean"].double(), copies(vectors), power)
        wanted, found = nearest(before if frozen else vectors), []
        for each in seen:
            near = (each @ images.mT).fill_diagonal_(-2)
            top = torch.zeros_like(near).scatter_(1, near.topk(NEIGHBOURS).indices, 1.0)
            found.append(top.gather(1, wanted).mean())
        return float(torch.stack(found).mean())

    return measure


def chosen(vectors: Vectors, _: Vectors) -> float:
    return float(scored(vectors["clean"].double(), other(vectors)).mean())


def rankme(vectors: Vectors, _: Vectors) -> float:
    shares = torch.linalg.svdvals(vectors["clean"].double())
    return float(torch.special.entr(shares / shares.sum() + 1e-7).sum())


def alpha_req(vectors: Vectors, _: Vectors) -> float:
    """Less the distance of the power law of the spectrum from 1."""
    clean = vectors["clean"].double()
    spectrum = torch.linalg.svdvals(clean - clean.mean(0)).square()[10:100]
    x, y = torch.arange(11, 11 + len(spectrum)).double().log(), spectrum.clamp(min=1e-30).log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    return -abs(float(-slope) - 1)


def lidar(copies: Callable[[Vectors], Tensor]) -> Callable[[Vectors, Vectors], float]:
    def measure(vectors: Vectors, _: Vectors) -> float:
        seen = copies(vectors).transpose(0, 1)
        centres = seen.mean(1)
        within = (seen - centres[:, None]).flatten(0, 1)
        within = within.T @ within / (len(within) - len(centres))
        within.diagonal().add_(1e-3 * within.diagonal().mean())
        values, axes = torch.linalg.eigh(within)
        root = axes * values**-0.5 @ axes.T
        shares = torch.linalg.eigvalsh(root @ torch.cov(centres.T) @ root).clamp(min=0)
        return float(torch.special.entr(shares / shares.sum() + 1e-9).sum())

    return measure


def clusters(vectors: Vectors, _: Vectors) -> float:
    """How well clusters of images agree with clusters of their distorted copies, averaged over kinds."""
    images, seen = whitened(vectors["clean"].double(), other(vectors), 0.5)
    groups = KMeans(20, n_init=3, random_state=0).fit(images.numpy())
    return sum(adjusted_mutual_info_score(groups.labels_, groups.predict(each.numpy())) for each in seen) / len(seen)


def before_this(vectors: Vectors, before: Vectors) -> float:
    """The quality of earlier releases, but for the penalty on lost dimensions."""
    both = (neighbours(0.0, views, frozen)(vectors, before) for frozen in (True, False))
    return sum(both) / 2


CANDIDATES: Mapping[str, Callable[[Vectors, Vectors], float]] = {
    "recognition and own neighbours, half whitened, other distortions (chosen)": chosen,
    "recognition, half whitened, other distortions": recognition(0.5, other),
    "recognition, not whitened, other distortions": recognition(0.0, other),
    "recognition, whitened, other distortions": recognition(1.0, other),
    "recognition, half whitened, the training's views": recognition(0.5, views),
    "own neighbours, half whitened, other distortions": neighbours(0.5, other, False),
    "own neighbours, whitened, other distortions": neighbours(1.0, other, False),
    "frozen neighbours, not whitened, other distortions": neighbours(0.0, other, True),
    "agreement of clusters, other distortions": clusters,
    "earlier releases (neighbours, the training's views)": before_this,
    "RankMe": rankme,
    "alpha-ReQ": alpha_req,
    "LiDAR, the training's views": lidar(views),
    "LiDAR, other distortions": lidar(other),
}


def decided(before: Vectors, after: Vectors) -> tuple[Gain, Gain, float]:
    """What the gate finds, with two of the seven copies of each image, as it has in a run: gain, gain in recognition
    alone, and quality."""
    number = len(before["clean"])
    kinds = torch.stack([(torch.arange(number) + 3 * copy) % len(DISTORTIONS) for copy in range(2)])
    scores, alone = [], []
    for vectors in (before, after):
        copies = other(vectors)[kinds, torch.arange(number)]
        scores.append(scored(vectors["clean"].double(), copies))
        alone.append(recognised(similarities(vectors["clean"].double(), copies)[1]))
    return Gain.of(*scores, kinds), Gain.of(*alone, kinds), as_quality(scores[1])


def measure(folder: Path) -> None:
    known = {tuple(line["key"]) for line in read()}
    for file in sorted(folder.glob("*.pt")):
        point = torch.load(file, weights_only=True)
        cell = point["cell"]
        key = (*cell.values(), point["step"])
        if tuple(map(str, key)) in {tuple(map(str, each)) for each in known}:
            continue
        before, after = point["before"]["vectors"], point["after"]["vectors"]
        gain, alone, quality = decided(before, after)
        labelled = bool(point["after"]["accuracy"])
        line: dict[str, Any] = {
            "key": key,
            "off": point["off"],
            "gain": gain.mean,
            "error": gain.error,
            "recognition": alone.mean / alone.error if alone.error else 0.0,
            "quality": quality,
            "accepted": gain.proven(LOOKS) and quality > LEAST,
            "accuracy": {
                name: [value, point["after"]["accuracy"][name]] for name, value in point["before"]["accuracy"].items()
            },
        }
        if labelled:
            line["candidates"] = {
                name: candidate(after, before) - candidate(before, before) for name, candidate in CANDIDATES.items()
            }
        with LOG.open("a") as log:
            log.write(json.dumps(line) + "\n")


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in LOG.read_text().splitlines()] if LOG.exists() else []


# ---- tables ----------------------------------------------------------------------------------------------------------


def points(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: 100 * (after - before) for name, (before, after) in line["accuracy"].items()}


def mean_gain(line: Mapping[str, Any]) -> float:
    changes = points(line)
    return sum(changes.values()) / len(changes)


def show() -> None:
    lines = read()
    learned = [line for line in lines if line["accuracy"]]
    parts = {part: [line for line in learned if line["key"][0] == part] for part in ("choose", "held-out", "now")}
    print("| candidate | chosen on: mean | k-NN, k = 200 | probe, 10 labels a class | other pairs: mean |")
    print("| --- | --- | --- | --- | --- |")
    for name in CANDIDATES:
        cells = []
        for part, truth in (
            ("choose", mean_gain),
            ("choose", lambda line: points(line)["knn 200"]),
            ("choose", lambda line: points(line)["probe few"]),
            ("held-out", mean_gain),
        ):
            found = [line["candidates"][name] for line in parts[part]]
            cells.append(f"{spearmanr(found, [truth(line) for line in parts[part]])[0]:+.2f}")
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\nRank correlations over {len(parts['choose'])} and {len(parts['held-out'])} points.\n")
    columns = list(points(learned[0]))
    print(f"| backbone | images | run | step | {' | '.join(columns)} | mean | gain / error | of recognition alone | |")
    print("| --- | --- | --- | --- |" + " --- |" * (len(columns) + 4))
    for part in parts.values():
        for line in part:
            _, backbone, images, recipe, _, step = line["key"]
            changes = " | ".join(f"{value:+.1f}" for value in points(line).values())
            ratios = f"{line['gain'] / line['error']:+.1f} | {line['recognition']:+.1f}"
            verdict = "accepted" if line["accepted"] else "refused"
            start = f"{backbone} | {images.removeprefix('small-')} | {recipe} | {step}"
            print(f"| {start} | {changes} | {mean_gain(line):+.1f} | {ratios} | {verdict} |")
    print()
    for part, found in parts.items():
        better, worse = ([line for line in found if sign * mean_gain(line) >= 1] for sign in (1, -1))
        for name, some in (("better by a point or more", better), ("worse by a point or more", worse)):
            print(
                f"{part}: of {len(some)} points that are {name} on average, {sum(x['accepted'] for x in some)} accepted"
            )
    for part in ("random", "noise"):
        for name in sorted({tuple(line["key"][1:3]) for line in lines if line["key"][0] == part}):
            some = [line for line in lines if line["key"][0] == part and tuple(line["key"][1:3]) == name]
            most = max(line["gain"] / line["error"] if line["error"] else -math.inf for line in some)
            count = f"{sum(line['accepted'] for line in some)} of {len(some)} accepted"
            print(f"{part} {' on '.join(name)}: {count}, highest gain {most:.1f} errors")
    print(f"A run takes luck for a gain in at most {MISTAKES:.0%} of cases by design, with {LOOKS} looks.")


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(Path(sys.argv[2])) if len(sys.argv) > 2 else show()
