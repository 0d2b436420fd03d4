"""A collection: images that were indexed, with the vectors of the frozen backbone and of masks, ready to be searched.

Whoever made it, reading it runs no code: nothing is unpickled, no file has a name of its choice, sizes and hashes are
checked before anything is used, and so is every number that leads somewhere. (`about.py` lists its files.)
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CollectionError, CorruptCollectionError, MissingExtraError, SelfmaskError
from ..evaluation.feature_map import FeatureMap
from ..evaluation.inputs import lengths_of
from ..maskfile import open_container
from ..maskfile.container import Container, Stored
from ..memory import memory_left
from .about import (
    ITEMS,
    MAX_NAME,
    THUMBNAILS,
    About,
    SpaceAbout,
    graph_file,
    map_file,
    plane_file,
    read_about,
    run_folder,
    vectors_file,
)
from .graph import Graph, Searcher
from .thumbnails import Thumbnails

MAX_NEIGHBOURS = 1000
"""That can be asked for at a time."""
_BLOCK = 1 << 20


class Neighbours(NamedTuple):
    """Numbers of the nearest images, nearest first, and the cosine similarity of each."""

    numbers: list[int]
    similarities: list[float]


class Space:
    """The vectors of all images of one kind, and how to search them."""

    def __init__(self, about: SpaceAbout, vectors: Tensor, whiten: FeatureMap | None, graph: Graph | None) -> None:
        self.about, self.vectors, self.map = about, vectors, whiten
        self._graph = None if graph is None else Searcher(graph, vectors)

    @property
    def name(self) -> str:
        return self.about.name

    @property
    def is_approximate(self) -> bool:
        return self._graph is not None

    def search(self, vectors: Tensor, k: int) -> list[Neighbours]:
        """The nearest images of each of these vectors, which are as the model gives them."""
        if vectors.ndim != 2 or vectors.shape[1] != self.about.width:
            raise CollectionError(
                "these vectors are not of the kind that was indexed",
                expected=f"rows of length {self.about.width}",
                found=list(vectors.shape),
            )
        if not bool(vectors.isfinite().all()):
            raise CollectionError("a vector to search for is not finite", found="NaN or infinity")
        return self._nearest(prepared(vectors, self.map), k)

    def near(self, number: int, k: int) -> Neighbours:
        """The nearest images of one of the collection, which is not one of them."""
        found = self._nearest(self.vectors[number][None], k + 1)[0]
        others = [pair for pair in zip(*found, strict=True) if pair[0] != number][:k]
        return Neighbours([each for each, _ in others], [similarity for _, similarity in others])

    def _nearest(self, queries: Tensor, k: int) -> list[Neighbours]:
        if not 1 <= k <= MAX_NEIGHBOURS + 1:
            raise CollectionError("too few or too many neighbours", expected=f"1 to {MAX_NEIGHBOURS}", found=k)
        k = min(k, len(self.vectors))
        if self._graph is not None:
            similarity, numbers = self._graph(queries, k)
        else:
            similarity, numbers = (queries @ self.vectors.T).topk(k, dim=1)
        return [
            Neighbours(own[own >= 0].tolist(), near[own >= 0].clamp(-1, 1).tolist())
            for own, near in zip(numbers, similarity, strict=True)
        ]


def prepared(vectors: Tensor, whiten: FeatureMap | None) -> Tensor:
    """Vectors as they are kept and searched for: through their map, and of length 1."""
    return F.normalize(vectors if whiten is None else whiten(vectors), dim=1)


class Collection:
    """Indexed images, open to be searched from any thread.

    >>> with Collection.open("photos.index") as collection:
    ...     collection.spaces["frozen"].search(vectors, k=10)
    """

    def __init__(
        self,
        folder: Path,
        about: About,
        spaces: Sequence[Space],
        items: Mapping[str, Tensor],
        planes: Sequence[Tensor | None],
        thumbnails: Thumbnails,
    ) -> None:
        self.folder, self.about, self.thumbnails = folder, about, thumbnails
        self.spaces = {space.name: space for space in spaces}
        self.planes = dict(zip(self.spaces, planes, strict=True))
        self.sampled: list[int] = items["sampled"].tolist()
        self._names, self._ends = items["names"].numpy().tobytes(), items["name_ends"]
        self._labels = items.get("labels")

    def __len__(self) -> int:
        return self.about.images

    def name(self, number: int) -> str:
        start = int(self._ends[number - 1]) if number else 0
        return self._names[start : int(self._ends[number])].decode("utf-8", "backslashreplace")

    def label(self, number: int) -> str | None:
        """The class of an image, where known."""
        if self._labels is None:
            return None
        label = int(self._labels[number])
        return str(label) if self.about.classes is None else self.about.classes[label]

    def labels(self, numbers: Sequence[int]) -> list[int] | None:
        """The numbers of the classes of some images, where known."""
        return None if self._labels is None else [int(self._labels[number]) for number in numbers]

    def listed(self, found: Neighbours) -> list[dict[str, Any]]:
        """What is known of images that were found, as plain values."""
        return [
            {"number": number, "name": self.name(number), "label": self.label(number), "similarity": similarity}
            for number, similarity in zip(*found, strict=True)
        ]

    @property
    def frozen(self) -> Space | None:
        return next((space for space in self.spaces.values() if space.about.is_frozen), None)

    def run_of(self, space: Space) -> Path | None:
        """The folder with what the vectors of a space were made with; None for the backbone alone."""
        number = list(self.spaces).index(space.name)
        return None if space.about.is_frozen else self.folder / run_folder(number)

    def close(self) -> None:
        self.thumbnails.close()

    def __enter__(self) -> Collection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def open(folder: str | Path) -> Collection:
        """Read a collection; whatever is wrong with it is a `CollectionError`."""
        folder = Path(folder)
        with _refusing(folder):
            about = read_about(folder)
            _check_memory(about)
            files = _Files(folder, about)
            items = files.items()
            spaces = [files.space(number) for number in range(len(about.spaces))]
            planes = [files.plane(number) for number in range(len(about.spaces))]
            files.check_runs()
            with files.opened(THUMBNAILS) as descriptor:
                thumbnails = Thumbnails(os.dup(descriptor), items["thumbnail_ends"])
        return Collection(folder, about, spaces, items, planes, thumbnails)


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Whatever is wrong, as an error of ours."""
    if not os.path.isdir(folder):  # noqa: PTH112  # Path.is_dir raises on names that no path can have
        raise CollectionError(
            f"{folder} is not a collection",
            expected="a folder that `selfmask index RUN IMAGES --out FOLDER` made",
            found="no such folder",
            todo="check the path, or make one",
        )
    try:
        yield
    except (CollectionError, MissingExtraError):
        raise
    except (SelfmaskError, ValueError, OSError) as error:
        if isinstance(error, SelfmaskError):
            found: object = f"{error.what}: {error.found}"
        else:
            found = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CorruptCollectionError(f"the collection {folder} cannot be read", found=str(found)[:300]) from error


def _check_memory(about: About) -> None:
    """Refuse more than there is room for: vectors, which faiss copies where there is a graph, and graphs."""
    needed = about.files[ITEMS].bytes
    for number in range(len(about.spaces)):
        graph = about.files.get(graph_file(number))
        needed += about.files[vectors_file(number)].bytes * (1 if graph is None else 2)
        needed += 0 if graph is None else 3 * graph.bytes
    if needed > (left := memory_left(psutil.virtual_memory().available)):
        raise CollectionError(
            "the collection does not fit into memory",
            expected=f"at most {left:,} bytes",
            found=f"{needed:,} bytes of vectors and indexes",
            todo="index fewer images or masks",
        )


class _Files:
    """The files of a collection; what is wrong with one is an OSError, a ValueError or an error of ours."""

    def __init__(self, folder: Path, about: About) -> None:
        self.folder, self.about = folder, about

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """The descriptor of a file whose size and hash are what they should be."""
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        about, descriptor = self.about.files[name], os.open(self.folder / name, flags)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size != about.bytes:
                raise ValueError(f"{name} should be a file of {about.bytes} bytes, and has {status.st_size}")
            total, left = hashlib.sha256(), about.bytes
            while left and (block := os.read(descriptor, min(_BLOCK, left))):
                total.update(block)
                left -= len(block)
            if total.hexdigest() != about.sha256:
                raise ValueError(f"the content of {name} has been altered")
            os.lseek(descriptor, 0, os.SEEK_SET)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def container(self, name: str) -> Iterator[Container]:
        with self.opened(name) as descriptor, open_container(descriptor, name) as file:
            yield file

    def items(self) -> dict[str, Tensor]:
        images = self.about.images
        with self.container(ITEMS) as file:
            expected = {
                "names": Stored("U8", file.table["names"].shape[:1] if "names" in file.table else ()),
                "name_ends": Stored("I64", (images,)),
                "thumbnail_ends": Stored("I64", (images,)),
                "sampled": Stored("I64", (self.about.sampled,)),
            }
            _check_table(file, expected | ({"labels": Stored("I64", (images,))} if "labels" in file.table else {}))
            items = file.read()
        lengths = torch.diff(items["name_ends"], prepend=torch.zeros(1, dtype=torch.int64))
        if bool(((lengths < 0) | (lengths > MAX_NAME)).any()) or int(items["name_ends"][-1]) != len(items["names"]):
            raise ValueError("the names of images are not where they should be")
        _check_range(items["sampled"], images, "an image on the plane")
        if "labels" in items and self.about.classes is not None:
            _check_range(items["labels"], len(self.about.classes), "a class")
        return items

    def space(self, number: int) -> Space:
        about, images = self.about.spaces[number], self.about.images
        with self.container(vectors_file(number)) as file:
            _check_table(file, {"vectors": Stored("F32", (images, about.width))})
            vectors = file.read()["vectors"]
        lengths = lengths_of(vectors)
        if not bool((((lengths - 1).abs() < 1e-3) | (lengths == 0)).all()):  # and with that no number is NaN
            raise ValueError("vectors that are not of length 1")
        whiten = graph = None
        if about.power is not None:
            with self.opened(map_file(number)) as descriptor:
                whiten = FeatureMap.load(descriptor).at(about.power)
            if whiten.width != about.width:
                raise ValueError(f"a map of vectors of length {whiten.width}, not {about.width}")
        if graph_file(number) in self.about.files:
            with self.opened(graph_file(number)) as descriptor:
                graph = Graph.load(descriptor, images)
        return Space(about, vectors, whiten, graph)

    def plane(self, number: int) -> Tensor | None:
        if plane_file(number) not in self.about.files:
            return None
        with self.container(plane_file(number)) as file:
            _check_table(file, {"points": Stored("F32", (self.about.sampled, 2))})
            points = file.read()["points"]
        if not bool(points.isfinite().all()):
            raise ValueError("points that lie nowhere")
        return points

    def check_runs(self) -> None:
        for name in self.about.files:
            if "/" in name:
                with self.opened(name):
                    pass


def _check_table(file: Container, expected: Mapping[str, Stored]) -> None:
    """Before anything is read: the tensors are just these."""
    if file.table != expected:
        found = ", ".join(f"{name[:50]} {stored}" for name, stored in list(file.table.items())[:5])
        raise ValueError(f"{file.name} holds other tensors than it should: {found}")


def _check_range(values: Tensor, most: int, what: str) -> None:
    if bool(((values < 0) | (values >= most)).any()):
        raise ValueError(f"{what} that does not exist")
