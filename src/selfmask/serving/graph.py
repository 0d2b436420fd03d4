"""The approximate index of a collection: a graph of near vectors (HNSW), built and searched by faiss.

Readers of index files are where faiss, hnswlib and usearch have been broken into: a number in such a file is a place in
memory. So no index file is ever read. The graph is kept as two plain arrays in a container of ours, and every number in
them is checked before faiss sees it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import MissingExtraError
from ..maskfile import Source, open_container
from ..maskfile.container import container_bytes

LINKS = 16
"""Neighbours of a vector in the graph; twice as many on the ground, where all vectors are."""
BREADTH = 200
"""Candidates that a search keeps, at least; more find more, and take longer."""
BUILD_BREADTH = 100
_AT_ONCE = 1000  # vectors added between two signs of life
FORMAT, _VERSION = "selfmask-graph", "1"


@dataclasses.dataclass(frozen=True)
class Graph:
    """How many floors each vector stands on, and its neighbours floor by floor, -1 where there are fewer."""

    floors: NDArray[np.int32]
    neighbours: NDArray[np.int32]

    def as_bytes(self) -> bytes:
        tensors = {"floors": torch.from_numpy(self.floors), "neighbours": torch.from_numpy(self.neighbours)}
        return container_bytes(tensors, {"format": FORMAT, "version": _VERSION}, FORMAT)

    @staticmethod
    def load(source: Source, count: int) -> Graph:
        """The graph of so many vectors; what could lead faiss astray is a ValueError (or a MaskFileError)."""
        with open_container(source, "the graph") as file:
            found = {name: (stored.dtype, len(stored.shape)) for name, stored in file.table.items()}
            if file.metadata.get("format") != FORMAT or file.metadata.get("version") != _VERSION:
                raise ValueError("it is not a graph of this version")
            if found != {"floors": ("I32", 1), "neighbours": ("I32", 1)} or file.table["floors"].shape != (count,):
                raise ValueError(f"floors of {count} vectors and their neighbours expected")
            tensors = file.read(FORMAT)
        graph = Graph(tensors["floors"].numpy(), tensors["neighbours"].numpy())
        graph.check()
        return graph

    def check(self) -> None:
        """Every neighbour is a vector that stands on the floor where it is one."""
        count, most = len(self.floors), len(_rooms()) - 1
        if not count or self.floors.min() < 1 or self.floors.max() > most:
            raise ValueError(f"vectors on 1 to {most} floors expected")
        starts = self.starts()
        if starts[-1] != len(self.neighbours):
            raise ValueError(f"{starts[-1]} neighbours expected, found {len(self.neighbours)}")
        if self.neighbours.min() < -1 or self.neighbours.max() >= count:
            raise ValueError(f"neighbours from -1 to {count - 1} expected")
        rooms = _rooms()
        for floor in range(1, int(self.floors.max())):  # all stand on the ground
            here = starts[:-1][self.floors > floor]
            slots = here[:, None] + np.arange(rooms[floor], rooms[floor + 1])
            near = self.neighbours[slots]
            if (self.floors[near[near >= 0]] <= floor).any():
                raise ValueError(f"a neighbour on floor {floor} that does not stand there")

    def starts(self) -> NDArray[np.int64]:
        """Where the neighbours of each vector begin, and where those of the last end."""
        lengths = _rooms()[self.floors]
        return np.concatenate([[0], np.cumsum(lengths)])


def _rooms() -> NDArray[np.int64]:
    """Room for neighbours on all floors below each."""
    return np.array([0, *(2 * LINKS + LINKS * floor for floor in range(8))])


def check_installed() -> None:
    """Said before the work, so that nothing is embedded in vain."""
    if find_spec("faiss") is None:
        raise MissingExtraError(
            "collections of this size need an approximate index, and faiss is not installed",
            todo="pip install 'selfmask[search]', or search exactly: --exact",
        )


def build(vectors: Tensor, progress: Callable[[int, int], None] | None = None) -> Graph:
    """The graph of vectors of length 1, [n, width]. With one thread it is the same every time."""
    index = _empty(vectors.shape[1])
    rows = vectors.numpy()
    for start in range(0, len(rows), _AT_ONCE):
        index.add(rows[start : start + _AT_ONCE])
        if progress is not None:
            progress(min(start + _AT_ONCE, len(rows)), len(rows))
    faiss = _faiss()
    floors, neighbours = (faiss.vector_to_array(each) for each in (index.hnsw.levels, index.hnsw.neighbors))
    graph = Graph(floors.astype(np.int32), neighbours.astype(np.int32))
    graph.check()
    return graph


class Searcher:
    """Nearest vectors by a graph; may be called from many threads."""

    def __init__(self, graph: Graph, vectors: Tensor) -> None:
        faiss = _faiss()
        self._index = _empty(vectors.shape[1])
        faiss.downcast_index(self._index.storage).add(vectors.numpy())
        self._index.ntotal = len(vectors)
        hnsw = self._index.hnsw
        faiss.copy_array_to_vector(graph.floors, hnsw.levels)
        faiss.copy_array_to_vector(graph.starts().astype(np.uint64), hnsw.offsets)
        faiss.copy_array_to_vector(graph.neighbours, hnsw.neighbors)
        hnsw.max_level = int(graph.floors.max()) - 1
        hnsw.entry_point = int(graph.floors.argmax())
        self._breadth = faiss.SearchParametersHNSW

    def __call__(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Similarities and numbers [queries, k] of the nearest, nearest first; -1 where fewer were found."""
        how = self._breadth(efSearch=max(BREADTH, 2 * k))
        similarity, numbers = self._index.search(queries.numpy(), k, params=how)
        return torch.from_numpy(similarity), torch.from_numpy(numbers)


def _empty(width: int) -> Any:
    faiss = _faiss()
    index = faiss.IndexHNSWFlat(width, LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = BUILD_BREADTH
    return index


def _faiss() -> Any:
    check_installed()
    import faiss  # of an extra

    faiss.omp_set_num_threads(torch.get_num_threads())  # left to itself it takes all cores
    return faiss
