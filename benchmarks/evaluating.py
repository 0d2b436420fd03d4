"""Evaluation: k-NN against the least it must do and against one-hot votes, the linear probe against scikit-learn.

`python -m benchmarks.evaluating` measures at full size, which takes some minutes and 2 GB of memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
import torch.nn.functional as F
from rich.console import Console
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits
from torch import Tensor

from selfmask.commands.opening import load_embedder
from selfmask.data import open_images
from selfmask.data.splits import label_split
from selfmask.embedding.vectors import embed
from selfmask.evaluation.knn import _AT_ONCE, knn_rank
from selfmask.evaluation.probe import PENALTY, linear_probe_fit

from .common import Row, as_row, as_table, pairs, peak_memory

MEMORY = 1 << 30
K, TEMPERATURE = 200, 0.1
ONE_HOT_BATCH = 100  # queries at a time: 80 MB of one-hot votes at full size


@dataclass(frozen=True)
class Size:
    """Of the features that k-NN is measured with."""

    bank: int = 50_000
    queries: int = 10_000
    width: int = 2048
    classes: int = 1000

    def __str__(self) -> str:
        return f"{self.bank:,} x {self.queries:,} x {self.width}, {self.classes:,} classes"


def clusters(count: int, width: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features as ReLU networks give them, with classes that overlap, and their labels; made without copies."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(0))
    features = torch.randn(count, width, generator=generator).mul_(2)
    for start in range(0, count, 1000):
        features[start : start + 1000] += centres[labels[start : start + 1000]]
    return features.relu_(), labels


# ---- k-NN ---------------------------------------------------------------------------------------------------------


def floor(bank: Tensor, queries: Tensor) -> None:
    """The bare chunked matrix product and top-k, on features that are of length 1 already."""
    step = max(1, _AT_ONCE // len(bank))
    similarity = torch.empty(step, len(bank))
    for start in range(0, len(queries), step):
        some = queries[start : start + step]
        torch.mm(some, bank.T, out=similarity[: len(some)]).topk(K, dim=1)


def one_hot(bank: Tensor, labels: Tensor, queries: Tensor, classes: int) -> Tensor:
    """What most scripts do: a one-hot vector for each neighbour, weighted and summed, for a batch at a time."""
    bank = F.normalize(bank, dim=1)
    ranked = []
    for start in range(0, len(queries), ONE_HOT_BATCH):
        similarity, neighbours = (F.normalize(queries[start : start + ONE_HOT_BATCH], dim=1) @ bank.T).topk(K, dim=1)
        votes = torch.zeros(*neighbours.shape, classes).scatter_(2, labels[neighbours][..., None], 1.0)
        votes = (votes * similarity.div(TEMPERATURE).exp()[..., None]).sum(1)
        ranked.append(votes.sort(1, descending=True).indices[:, :5])
    return torch.cat(ranked)


def knn_rows(size: Size, rounds: int) -> list[Row]:
    (bank, labels), (queries, _) = (
        clusters(count, size.width, size.classes, seed) for seed, count in ((1, size.bank), (2, size.queries))
    )
    ready = F.normalize(bank, dim=1), F.normalize(queries, dim=1)
    found: dict[str, Tensor] = {}

    def ours() -> None:
        found["ours"] = knn_rank(bank, labels, queries, k=K, temperature=TEMPERATURE)

    def theirs() -> None:
        found["one-hot"] = one_hot(bank, labels, queries, size.classes)

    floor(ready[0], ready[1][:100])  # for warming up
    seconds = [[timed(run) for run in (ours, lambda: floor(*ready), theirs)] for _ in range(rounds)]
    same = float((found["ours"][:, 0] == found["one-hot"][:, 0]).double().mean())
    assert same > 0.999, f"only {same:.2%} of the predictions agree"
    return [
        as_row(f"k-NN, {size}: ours / the bare product and top-k", [(a, b) for a, b, _ in seconds], 1.15),
        as_row(f"k-NN, {size}: ours / one-hot votes", [(a, c) for a, _, c in seconds], 1.0),
    ]


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def memory_row(size: Size) -> Row:
    """Measured in a process of its own: how much more memory k-NN takes than the features do."""
    arguments = [str(number) for number in (size.bank, size.queries, size.width, size.classes)]
    command = [sys.executable, "-m", "benchmarks.evaluating", "--memory-of", *arguments]
    extra = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return Row(f"k-NN, {size}: memory beyond the features / 1 GB", f"{extra >> 20} MB", "1024 MB", extra / MEMORY, 1.0)


def memory_of(size: Size) -> int:
    (bank, labels), (queries, _) = (
        clusters(count, size.width, size.classes, seed) for seed, count in ((1, size.bank), (2, size.queries))
    )
    before = psutil.Process().memory_info().rss
    knn_rank(bank, labels, queries, k=K, temperature=TEMPERATURE)
    return peak_memory() - before


# ---- linear probe -------------------------------------------------------------------------------------------------


def probe_rows(width: int, rounds: int) -> list[Row]:
    embedder, images = load_embedder("selfmask/tiny"), open_images("selfmask/fashion")
    features, kept = embed(embedder.model, images, embedder.preprocessing)
    assert images.labels is not None
    labels = torch.tensor(images.labels)[kept]
    few = label_split(labels.tolist(), 0.01, 0)
    return [
        probe_row("1 % of fashion", features[few], labels[few], 15),  # milliseconds
        probe_row("fashion", features, labels, rounds),
        probe_row("clusters", *clusters(5000, width, 100, 1), rounds),
    ]


def probe_row(name: str, features: Tensor, labels: Tensor, rounds: int) -> Row:
    """Against scikit-learn with the loosest tolerance that reaches the optimum, to 1e-4 of the loss.

    And with one thread or all, whichever is faster: its threads and those of torch can be in each other's way.
    """
    rows = F.normalize(features, dim=1).numpy()
    rows -= rows.mean(0)  # which helps it, and leaves the optimum where it is
    targets = labels.numpy()

    def scikit_learn(tolerance: float, threads: int | None = None) -> LogisticRegression:
        with threadpool_limits(threads):
            return LogisticRegression(C=1 / PENALTY, max_iter=10_000, tol=tolerance).fit(rows, targets)

    def reached(tolerance: float) -> float:
        model = scikit_learn(tolerance)
        return loss(torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_))

    def loss(weight: Tensor, bias: Tensor) -> float:
        scores = F.linear(torch.from_numpy(rows).double(), weight.double(), bias.double())
        return float(F.cross_entropy(scores, labels) + PENALTY / len(rows) / 2 * weight.double().square().sum())

    fit = linear_probe_fit(features, labels)
    mean = F.normalize(features, dim=1).mean(0)
    ours, best = loss(fit.weight, fit.bias + fit.weight @ mean), reached(1e-7)
    assert ours <= best + 1e-4, f"{name}: {ours} is no optimum, {best} is lower"
    best = min(ours, best)
    tolerance = next(each for each in (1e-4, 5e-5, 2e-5, 1e-5, 5e-6, 1e-7) if reached(each) <= best + 1e-4)
    threads = min((1, None), key=lambda each: min(timed(lambda: scikit_learn(tolerance, each)) for _ in range(2)))
    measured = pairs(lambda: linear_probe_fit(features, labels), lambda: scikit_learn(tolerance, threads), rounds)
    sizes = f"{len(rows):,} x {rows.shape[1]}, {len(set(labels.tolist()))} classes"
    return as_row(f"linear probe, {name}, {sizes}: ours / scikit-learn, tol {tolerance:g}", measured, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bank", type=int, default=Size.bank)
    parser.add_argument("--queries", type=int, default=Size.queries)
    parser.add_argument("--width", type=int, default=Size.width)
    parser.add_argument("--classes", type=int, default=Size.classes)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-of", type=int, nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory_of:
        print(memory_of(Size(*given.memory_of)))
        return 0
    console = Console(width=150)
    size = Size(given.bank, given.queries, given.width, given.classes)
    console.print(f"k-NN at {size} ...", highlight=False)
    rows = [*knn_rows(size, given.rounds), memory_row(size)]
    console.print("linear probes ...")
    rows += probe_rows(given.width, given.rounds)
    console.print(as_table(rows))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
