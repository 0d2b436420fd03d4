"""Building a collection: images embedded once for all spaces, thumbnails, maps, graphs, planes.

All work is done in `OUT.partial`, stage by stage, each written whole or not at all: stopped at any moment, the same
call goes on. At the end that folder gets the name of the collection, in one step.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import checked
from ..data import Images
from ..data.identity import Unchanged
from ..data.npz import TooLargeError, open_npz
from ..embedding.embedder import FROZEN, Embedder
from ..embedding.features import write_features
from ..embedding.mapping import made_for
from ..embedding.vectors import Progress
from ..errors import (
    CollectionError,
    CollectionWriteError,
    EvaluationError,
    ForeignFolderError,
    SelfmaskError,
    unwritable,
)
from ..evaluation.feature_map import MAX_WIDTH, FeatureMap
from ..evaluation.tsne import LEAST, plane_of
from ..files import RunFile, remove_temporaries, sync_folder, write_atomically
from ..locks import Lock
from ..maskfile import open_container
from ..maskfile.container import container_bytes
from . import graph
from .about import (
    ABOUT,
    ITEMS,
    THUMBNAILS,
    About,
    FileAbout,
    SpaceAbout,
    as_json,
    graph_file,
    map_file,
    plane_file,
    run_folder,
    vectors_file,
)
from .collection import prepared
from .spaces import Kind, Source, Together, kinds_of
from .thumbnails import sha256, write_thumbnails

APPROXIMATE_FROM = 20_000
"""Images from which on the nearest are looked for by a graph: below, looking at all of them takes milliseconds."""
POINTS = 2000
"""Images on a plane, at most: t-SNE of so many takes seconds."""
Stage = Callable[[str], AbstractContextManager[Progress]]
"""Tells the user what is going on, and how far."""
_WORK, _FEATURES, _EMBEDDED = "work.json", "features.npz", "features.json"
_MAX_NOTES = 1 << 30  # bytes of names of images that could not be read


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to build: the power of whitening (None: each map's own), or no maps at all; sizes; no graph, if `exact`."""

    power: float | None = None
    maps: bool = True
    thumbnail: int = 128
    exact: bool = False
    batch_size: int = 64


@dataclasses.dataclass(frozen=True)
class Built:
    """What came of it: how many images an earlier run had done, and what was left out and why."""

    about: About
    resumed: int
    bad: list[tuple[str, str]]


def build_collection(
    out: Path,
    sources: Sequence[Source],
    images: Images,
    settings: Settings,
    *,
    title: str,
    stage: Stage,
    say: Callable[[str], None],
    loading: Mapping[str, Any] | None = None,
) -> Built:
    """Index images under the frozen backbone and every source. loading: as in `About`, for backbones alone."""
    spaces = kinds_of(sources)
    if len(images) >= APPROXIMATE_FROM and not settings.exact:
        graph.check_installed()
    with _disk_errors(out), _Work(out, spaces, images, settings, say) as work:
        written = work.embed(stage)
        work.thumbnails(stage)
        abouts = tuple(work.space(number, stage) for number in range(len(spaces)))
        work.copy_runs()
        about = work.about(title, abouts, loading or {})
        work.finish(about)
    return Built(about, written["resumed"], [(name, why) for name, why in written["bad"]])


# ---- stages ----------------------------------------------------------------------------------------------------------


class _Work:
    """The folder in which a collection is made; held against others, and kept until the collection is whole."""

    def __init__(
        self, out: Path, kinds: Sequence[Kind], images: Images, settings: Settings, say: Callable[[str], None]
    ) -> None:
        _check_free(out)
        self.out, self.folder = out, out.with_name(f"{out.name}.partial")
        self.kinds, self.images, self.settings, self._say = kinds, images, settings, say
        self.together = Together(kinds).eval()
        self.embedder = kinds[0].source.embedder
        self.widths = self.together.widths(self.embedder.preprocessing.size)

    def __enter__(self) -> _Work:
        self._lock = Lock(self.folder / RunFile.LOCK, self.out, CollectionWriteError)
        try:
            self._unchanged = Unchanged(self.images)
            self._begin()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _begin(self) -> None:
        """Go on with what an earlier call left, if it was for the same."""
        about = {
            "models": [kind.source.embedder.fingerprint(kind.variant) for kind in self.kinds],
            "names": [kind.name for kind in self.kinds],
            "maps": [None if each.source.whiten is None else each.source.whiten.sha256 for each in self.kinds],
            "images": self._unchanged.content,
            "settings": dataclasses.asdict(self.settings),
        }
        before = self._before()
        if before is not None and before != json.loads(json.dumps(about)):
            self._say(f"{self.folder} holds partial work for other inputs: starting from the beginning")
            self._clear()
        remove_temporaries(self.folder)
        self._write(_WORK, json.dumps(about).encode())

    def _before(self) -> object:
        """What an earlier call was for; None if there was none. A folder of other files is refused."""
        there = {each.name for each in self.folder.iterdir()} - {RunFile.LOCK}
        if there and _WORK not in there:
            raise ForeignFolderError(
                f"{self.folder} contains files, but no unfinished collection",
                found=", ".join(sorted(there)[:3]),
                todo="choose another name: --out (nothing was changed in that folder)",
            )
        try:
            return checked.document(checked.content(self.folder / _WORK)) if there else None
        except (OSError, ValueError) as error:
            return {"unreadable": str(error)}

    def _clear(self) -> None:
        for each in self.folder.iterdir():
            if each.name != RunFile.LOCK:
                shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()

    def _write(self, name: str, data: bytes) -> None:
        write_atomically(self.folder / name, data, CollectionWriteError)

    def embed(self, stage: Stage) -> dict[str, Any]:
        """The vectors of all spaces side by side, in one file."""
        notes = self.folder / _EMBEDDED
        if not notes.exists():
            everything = Embedder(
                "all", self.together, self.embedder.preprocessing, sum(self.widths), variants=self.together
            )
            with stage("embedding") as progress:
                written = write_features(
                    self.folder / _FEATURES,
                    everything,
                    self.images,
                    batch_size=self.settings.batch_size,
                    progress=progress,
                    say=self._say,
                )
            self._write(_EMBEDDED, json.dumps({"resumed": written.resumed, "bad": written.bad}).encode())
            found: dict[str, Any] = {"resumed": written.resumed, "bad": written.bad}
        else:
            found = {**checked.document(checked.content(notes, most=_MAX_NOTES), most=_MAX_NOTES)}
            found["resumed"] = len(self.images)
        bad = {name for name, _ in found["bad"]}
        self.kept = [number for number, name in enumerate(self.images.names) if name not in bad]
        order = torch.randperm(len(self.kept), generator=torch.Generator().manual_seed(0))
        self.sampled = order[:POINTS].sort().values
        return found

    def thumbnails(self, stage: Stage) -> None:
        """And all else that is known of each image."""
        if (self.folder / ITEMS).exists():
            return
        with stage("thumbnails") as progress:
            ends = write_thumbnails(
                self.folder / THUMBNAILS,
                self.folder,
                self.images,
                self.kept,
                side=self.settings.thumbnail,
                progress=progress,
            )
        names = [self.images.names[number].encode() for number in self.kept]
        items = {
            "names": torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8),
            "name_ends": torch.tensor([len(name) for name in names]).cumsum(0),
            "thumbnail_ends": ends,
            "sampled": self.sampled,
        }
        if self.images.labels is not None:
            items["labels"] = torch.tensor([self.images.labels[number] for number in self.kept])
        self._write(ITEMS, container_bytes(items, {}))

    def space(self, number: int, stage: Stage) -> SpaceAbout:
        """Map, vectors, graph and plane of a space, as far as they are not there."""
        kind, folder = self.kinds[number], self.folder
        if not (folder / vectors_file(number)).exists():
            raw = self._raw(number)
            whiten = self._map(kind, raw)
            if whiten is not None:
                self._write(map_file(number), whiten.as_bytes())
            self._write(vectors_file(number), container_bytes({"vectors": prepared(raw, whiten)}, {}))
            del raw
        vectors = _vectors_of(folder / vectors_file(number))
        if len(vectors) >= APPROXIMATE_FROM and not self.settings.exact and not (folder / graph_file(number)).exists():
            with stage(f"index of {kind.name}") as progress:
                self._write(graph_file(number), graph.build(vectors, progress).as_bytes())
        if len(self.sampled) >= LEAST and not (folder / plane_file(number)).exists():
            with stage(f"plane of {kind.name}"):
                points = torch.from_numpy(plane_of(vectors[self.sampled], seed=0))
            self._write(plane_file(number), container_bytes({"points": points}, {}))
        power = FeatureMap.load(folder / map_file(number)).power if (folder / map_file(number)).exists() else None
        made = made_for(kind.source.embedder, kind.variant)
        return SpaceAbout(kind.name, kind.title, kind.variant, self.widths[number], made, power)

    def _raw(self, number: int) -> Tensor:
        start = sum(self.widths[:number])
        try:
            with open_npz(self.folder / _FEATURES) as file:
                vectors = torch.from_numpy(file.read("vectors"))
        except TooLargeError as error:
            raise CollectionError(
                "the vectors do not fit into memory", found=error, todo="index fewer images or masks at a time"
            ) from error
        return vectors[:, start : start + self.widths[number]].contiguous()

    def _map(self, kind: Kind, raw: Tensor) -> FeatureMap | None:
        """The run's own map, or one that is fitted to these vectors; none where there can be none."""
        if not self.settings.maps or raw.shape[1] > MAX_WIDTH:
            return None
        whiten = kind.source.whiten if kind.variant != FROZEN or kind.source.is_frozen else None
        if whiten is None:
            try:
                whiten = FeatureMap.fit(raw, made_for=made_for(kind.source.embedder, kind.variant))
            except EvaluationError:  # of one image, say
                return None
        return whiten if self.settings.power is None else whiten.at(self.settings.power)

    def copy_runs(self) -> None:
        for number, kind in enumerate(self.kinds):
            for name, content in kind.source.files.items() if kind.variant != FROZEN else ():
                data = content.read_bytes() if isinstance(content, Path) else content
                self._write(f"{run_folder(number)}/{name}", data)

    def about(self, title: str, spaces: tuple[SpaceAbout, ...], loading: Mapping[str, Any]) -> About:
        classes = self.images.classes if self.images.labels is not None else None
        names = [ITEMS, THUMBNAILS]
        for number, kind in enumerate(self.kinds):
            parts = (vectors_file, map_file, graph_file, plane_file)
            names += [each(number) for each in parts if (self.folder / each(number)).exists()]
            if kind.variant != FROZEN:
                names += [f"{run_folder(number)}/{name}" for name in kind.source.files]
        files = {name: FileAbout((self.folder / name).stat().st_size, sha256(self.folder / name)) for name in names}
        return About(
            title,
            len(self.kept),
            len(self.sampled),
            None if classes is None else tuple(classes),
            spaces,
            files,
            **loading,
        )

    def finish(self, about: About) -> None:
        self._unchanged.check()
        self._write(ABOUT, json.dumps(as_json(about), indent=2).encode())
        self._lock.close(remove=True)
        self.folder.rename(self.out)
        sync_folder(self.out.parent)
        for name in (_FEATURES, _EMBEDDED, _WORK):  # only now: until then, all is needed to go on
            (self.out / name).unlink(missing_ok=True)


def _vectors_of(file: Path) -> Tensor:
    with open_container(file) as opened:
        return opened.read()["vectors"]


def _check_free(out: Path) -> None:
    """Nothing may stand where the collection will be."""
    if out.exists() or out.is_symlink():
        is_one = (out / ABOUT).is_file()
        raise ForeignFolderError(
            f"{out} is a collection already" if is_one else f"{out} exists, and is not a collection",
            expected="a folder that does not exist yet",
            todo="choose another: --out (nothing was changed in this one)",
        )


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except SelfmaskError:
        raise
    except OSError as error:
        raise CollectionWriteError(
            f"cannot write {out}", expected="a new folder, on a disk with free space", **unwritable(error)
        ) from error
