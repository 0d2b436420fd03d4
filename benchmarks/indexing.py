"""Approximate indexes on real vectors: what they find, how fast, and in how many bytes, against exact search.

    python -m benchmarks.indexing [--data selfmask/fashion] [--backbone selfmask/tiny] [--copies 1]

The images of the training split are indexed, 1,000 of the test split are searched for one at a time, as a server does.
All have one thread, and as many links and candidates as our own; times are of the CPU, so that what else a machine does
does not count. `--copies` adds distorted copies of the images, where there are too few of them. hnswlib and usearch are
measured if they are installed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from selfmask.commands.opening import load_embedder
from selfmask.data import Images, SomeImages, open_images
from selfmask.data.distortions import DISTORTIONS
from selfmask.data.pixels import fit
from selfmask.embedding.vectors import embed
from selfmask.evaluation.feature_map import FeatureMap
from selfmask.preprocessing import Preprocessing
from selfmask.serving import graph
from selfmask.serving.collection import prepared

K, QUERIES = 10, 1000
Rows = NDArray[np.float32]
Search = Callable[[Rows], NDArray[Any]]
"""One vector [1, width] in, the numbers of the nearest [1, K] out."""


class Copies:
    """Images, and distorted copies of each."""

    def __init__(self, images: Images, copies: int, preprocessing: Preprocessing) -> None:
        self.images, self.copies, self.preprocessing = images, copies, preprocessing

    def __len__(self) -> int:
        return len(self.images) * self.copies

    def __getitem__(self, number: int, /) -> Tensor:
        copy, place = divmod(number, len(self.images))
        image = fit(self.images[place], self.preprocessing)
        if not copy:
            return image
        distort = DISTORTIONS[(place + copy) % len(DISTORTIONS)]
        return distort(image[None] / 255, torch.Generator().manual_seed(number))[0].mul(255).round().byte()


class Made(NamedTuple):
    """An index: how to search it, the bytes that it takes on a disk besides the vectors, and in all."""

    search: Search
    besides: int
    total: int


def exact(bank: Rows) -> Made:
    rows = torch.from_numpy(bank)
    return Made(lambda query: (torch.from_numpy(query) @ rows.T).topk(K).indices.numpy(), 0, bank.nbytes)


def ours(bank: Rows) -> Made:
    made = graph.build(torch.from_numpy(bank))
    size = len(made.as_bytes())
    search = graph.Searcher(made, torch.from_numpy(bank))
    return Made(lambda query: search(torch.from_numpy(query), K)[1].numpy(), size, size + bank.nbytes)


def faiss_ivf(bank: Rows) -> Made:
    import faiss

    faiss.omp_set_num_threads(1)
    lists = int(4 * len(bank) ** 0.5)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(bank.shape[1]), bank.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
    index.train(bank)
    index.add(bank)
    index.nprobe = max(1, lists // 25)
    total = len(faiss.serialize_index(index))
    return Made(lambda query: index.search(query, K)[1], total - bank.nbytes, total)


def hnswlib(bank: Rows) -> Made:
    import hnswlib

    index = hnswlib.Index("ip", bank.shape[1])
    index.init_index(len(bank), ef_construction=graph.BUILD_BREADTH, M=graph.LINKS)
    index.set_num_threads(1)
    index.add_items(bank, num_threads=1)
    index.set_ef(graph.BREADTH)
    with tempfile.TemporaryDirectory() as folder:
        index.save_index(f"{folder}/index")
        total = Path(folder, "index").stat().st_size
    return Made(lambda query: index.knn_query(query, K, num_threads=1)[0], total - bank.nbytes, total)


def usearch(bank: Rows) -> Made:
    from usearch.index import Index

    index = Index(
        ndim=bank.shape[1],
        metric="ip",
        dtype="f32",
        connectivity=graph.LINKS,
        expansion_add=graph.BUILD_BREADTH,
        expansion_search=graph.BREADTH,
    )
    index.add(np.arange(len(bank)), bank, threads=1)
    total = len(index.save())
    return Made(lambda query: index.search(query[0], K, threads=1).keys[None], total - bank.nbytes, total)


def sides() -> Iterator[tuple[str, Callable[[Rows], Made]]]:
    yield "exact (torch)", exact
    yield "ours (faiss HNSW, arrays)", ours
    yield "faiss IVF", faiss_ivf
    for name, side in (("hnswlib", hnswlib), ("usearch", usearch)):
        if find_spec(name) is not None:
            yield name, side


def recall(found: list[NDArray[Any]], right: list[NDArray[Any]]) -> float:
    shares = [len({*a[0].tolist()} & {*b[0].tolist()}) / K for a, b in zip(found, right, strict=True)]
    return statistics.mean(shares)


def vectors(data: str, backbone: str, copies: int) -> tuple[Rows, Rows]:
    """Of the collection, and of the queries: whitened, as collections are by default."""
    embedder = load_embedder(backbone)
    model, preprocessing = embedder.module([embedder.variant]), embedder.preprocessing
    train, test = open_images(data, split="train"), open_images(data, split="test")
    bank, _ = embed(model, Copies(train, copies, preprocessing), preprocessing)
    asked, _ = embed(model, SomeImages(test, range(min(QUERIES, len(test)))), preprocessing)
    whiten = FeatureMap.fit(bank)
    return prepared(bank, whiten).numpy(), prepared(asked, whiten).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="selfmask/fashion")
    parser.add_argument("--backbone", default="selfmask/tiny")
    parser.add_argument("--copies", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bank, queries = vectors(options.data, options.backbone, options.copies)
    table = Table("", f"recall@{K}", "build", "query", "query / exact", "bytes / vectors", "bytes besides vectors")
    table.title = f"{len(bank):,} vectors of length {bank.shape[1]}, {len(queries):,} queries, one thread"
    right: list[NDArray[Any]] = []
    plain = 0.0
    for name, make in sides():
        begin = time.process_time()
        made = make(bank)
        built = time.process_time() - begin
        seconds, found = list[float](), list[NDArray[Any]]()
        for query in queries:
            begin = time.process_time()
            found.append(made.search(query[None]))
            seconds.append(time.process_time() - begin)
        right, plain = right or found, plain or statistics.median(seconds)
        median = statistics.median(seconds)
        table.add_row(
            name,
            f"{recall(found, right):.4f}",
            f"{built:.1f} s",
            f"{median * 1e3:.3f} ms",
            f"{median / plain:.3f}",
            f"{made.total / bank.nbytes:.3f}",
            f"{made.besides:,}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
