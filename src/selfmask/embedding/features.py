"""Files of vectors: written part by part, so that a run cut short goes on where it was, to the identical file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import checked
from ..data import Images
from ..data.identity import digest, stamps
from ..data.names import names_hash
from ..data.npz import open_npz
from ..errors import EvaluationError, FeaturesWriteError, ImagesChangedError, MissingExtraError, unwritable
from ..files import RunFile, remove_temporaries, replacing
from ..locks import Lock
from .embedder import Embedder
from .vectors import EmbeddedBatch, Progress, embed_batches

_PART = 2048  # images between two saves, at most
_PART_BYTES = 64 << 20  # of their vectors, at most, or those of one batch: so many are held in memory
_ROUNDS = 4  # how often to look for parts that are to be made, or made again because their images changed
_OURS = re.compile(r"[0-9a-f]{12}(-\d{6}\.npz|\.json)")  # names in the folder of parts


@dataclasses.dataclass(frozen=True)
class Written:
    """What a file of vectors holds, how many images an earlier run had done, and what was left out and why."""

    rows: int
    width: int
    resumed: int
    bad: list[tuple[str, str]]


def write_features(
    path: Path,
    embedder: Embedder,
    images: Images,
    *,
    batch_size: int = 64,
    workers: int | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = print,
    partial: Path | None = None,
) -> Written:
    """Embed all images into `path`, a .parquet or .npz file of names and vectors.

    Finished parts go to the folder `partial`, by default `PATH.partial`; killed at any moment, the same call goes on
    after the last of them. The file appears whole, at the end. `say` is told where an earlier run could be used, and
    where it could not.
    """
    assemble, partial = _format(path), partial or path.with_name(f"{path.name}.partial")
    with _disk_errors(path), _held(partial, path):
        work = _Parts(partial, embedder, images, batch_size, say)
        resumed = work.finished()
        if resumed:
            say(f"{resumed:,} of {len(images):,} images were embedded already: continuing with the rest")
        for _ in range(_ROUNDS):
            todo = work.todo()
            if not todo:
                break
            work.make(todo, workers, progress)
        else:
            raise ImagesChangedError(
                "images change faster than they can be embedded",
                todo="wait until nobody writes to them, then run the same command again",
            )
        names, bad = _outcome(work.parts, images)
        assemble(path, names, embedder, work.parts)
        _clear(partial)
    return Written(len(names), embedder.width, resumed, bad)


# ---- parts --------------------------------------------------------------------------------------------------------


@contextmanager
def _held(folder: Path, path: Path) -> Iterator[None]:
    """The folder of parts, which nobody else may write to, or clear."""
    lock = Lock(folder / RunFile.LOCK, path, FeaturesWriteError)
    try:
        yield
    finally:
        lock.close(remove=True)  # the folder goes with it, unless there is something else in it
        with suppress(OSError):
            folder.rmdir()


class _Parts:
    """The work of one run, in files of so many images each; where the content of these changed, it is made again."""

    def __init__(
        self, folder: Path, embedder: Embedder, images: Images, batch_size: int, say: Callable[[str], None]
    ) -> None:
        self.embedder, self.images, self.batch_size, self._say = embedder, images, batch_size, say
        # Whole batches, so that a resumed run cuts the images into the same batches: outputs depend on them, slightly.
        images_a_part = min(_PART, _PART_BYTES // (4 * embedder.width))
        self.size = max(1, images_a_part // batch_size) * batch_size
        about = self._about()
        text = json.dumps(about, indent=2)
        run = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.parts = [folder / f"{run}-{number:06d}.npz" for number in range(-(-len(images) // self.size))]
        if not (folder / f"{run}.json").exists() and (before := _read_json(folder)):
            differs = sorted({key for other in before for key in about if other.get(key) != about[key]})
            what = ", ".join(differs) or "unknown"
            say(f"{folder} holds partial results for other inputs ({what}): starting from the beginning")
            _clear(folder)
        remove_temporaries(folder)
        with replacing(folder / f"{run}.json") as file:
            file.write(text.encode())
        self._stamps = [""] * len(self.parts)
        self._contents: list[str | None] = [None] * len(self.parts)

    def _about(self) -> dict[str, Any]:
        """What makes the vectors what they are, besides the content of images: work of another run is of no use."""
        names = names_hash(self.images.names)
        model = self.embedder.fingerprint(self.embedder.variant)
        return {"model": model, "images": names, "max pixels": self.images.max_pixels, "batch size": self.batch_size}

    def finished(self) -> int:
        """How many images need not be embedded any more."""
        todo = self.todo()
        if changed := sum(len(self._numbers(part)) for part in todo if _content(self.parts[part], self._numbers(part))):
            self._say(f"images were changed since they were embedded: {changed:,} are embedded again")
        return len(self.images) - sum(len(self._numbers(part)) for part in todo)

    def todo(self) -> list[int]:
        """The parts that are not there, or not of the images as they are now."""
        todo = []
        for part, path in enumerate(self.parts):
            # First the stamps, then the content: what changes in between has another stamp the next time.
            if (now := stamps(self.images, self._numbers(part))) != self._stamps[part]:
                self._stamps[part], self._contents[part] = now, None
            if (kept := _content(path, self._numbers(part))) is None or kept != self._now(part):
                todo.append(part)
        return todo

    def _now(self, part: int) -> str:
        """The content of the images of a part; asked as late as can be, since all of them are read for it."""
        if (content := self._contents[part]) is None:
            content = self._contents[part] = digest(self.images, self._numbers(part))
        return content

    def _numbers(self, part: int) -> range:
        return range(part * self.size, min((part + 1) * self.size, len(self.images)))

    def make(self, todo: list[int], workers: int | None, progress: Progress | None) -> None:
        """Embed the images of these parts; neighbours in one go, so that decoding is ahead all the time."""
        done = len(self.images) - sum(len(self._numbers(part)) for part in todo)
        for first, last in _stretches(todo):
            batches = embed_batches(
                self.embedder.module([self.embedder.variant]),
                self.images,
                self.embedder.preprocessing,
                batch_size=self.batch_size,
                workers=workers,
                start=self._numbers(first).start,
                stop=self._numbers(last).stop,
            )
            with closing(batches):
                for part in range(first, last + 1):
                    made = list[EmbeddedBatch]()
                    for batch in islice(batches, self.size // self.batch_size):
                        made.append(batch)
                        done += len(batch.indices) + len(batch.bad)
                        if progress is not None:
                            progress(done, len(self.images))
                    content = self._now(part)
                    if stamps(self.images, self._numbers(part)) == self._stamps[part]:  # else: of which images?
                        _write_part(self.parts[part], made, content)


def _stretches(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of neighbours."""
    first = numbers[0]
    for number, after in zip(numbers, [*numbers[1:], None], strict=True):
        if after != number + 1:
            yield first, number
            first = after if after is not None else first


def _write_part(path: Path, batches: list[EmbeddedBatch], content: str) -> None:
    bad = [entry for batch in batches for entry in batch.bad]
    arrays = {
        "indices": np.array([number for batch in batches for number in batch.indices], np.int64),
        "vectors": torch.cat([batch.features for batch in batches if batch.indices] or [torch.empty(0, 0)]).numpy(),
        "bad": np.array([number for number, _ in bad], np.int64),
        "reasons": np.array([reason for _, reason in bad], np.str_),
        "content": np.array(content),
    }
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with _member(archive, name) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _read_json(folder: Path) -> list[dict[str, Any]]:
    """What earlier runs say of themselves."""
    found = []
    for file in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError):
            if _OURS.fullmatch(file.name):
                found.append(checked.mapping(checked.document(checked.content(file))))
    return found


def _clear(folder: Path) -> None:
    """Remove what we put there, and nothing else."""
    remove_temporaries(folder)
    for file in folder.iterdir():
        if _OURS.fullmatch(file.name):
            file.unlink(missing_ok=True)


def _content(part: Path, numbers: range) -> str | None:
    """The content of the images whose vectors these are; None if the part is not there, or not of these images.

    All sums are checked, and what does not fit is made anew.
    """
    try:
        with open_npz(part) as file:
            indices, vectors, bad, reasons = (file.read(name) for name in ("indices", "vectors", "bad", "reasons"))
            content = str(file.read("content"))
        fits = (
            indices.dtype == bad.dtype == np.int64
            and vectors.dtype == np.float32
            and reasons.dtype.kind == "U"
            and indices.ndim == bad.ndim == reasons.ndim == 1
            and (vectors.ndim, len(vectors), len(bad)) == (2, len(indices), len(reasons))
            and sorted([*indices.tolist(), *bad.tolist()]) == list(numbers)
        )
        return content if fits else None
    except Exception:  # zip, zlib, numpy and its parser of headers raise many kinds on damaged files
        return None


def _outcome(parts: list[Path], images: Images) -> tuple[list[str], list[tuple[str, str]]]:
    """The names of the images that have a vector, and of those that have none, with the reason."""
    names, bad = list[str](), list[tuple[str, str]]()
    for part in parts:
        with open_npz(part) as file:
            names += [images.names[number] for number in file.read("indices")]
            bad += [(images.names[i], str(why)) for i, why in zip(file.read("bad"), file.read("reasons"), strict=True)]
    if not names:
        raise EvaluationError(
            f"none of the {len(images):,} images could be read",
            found="; ".join(f"{name}: {why}" for name, why in bad[:3]),
            todo="check the images that were given",
        )
    return names, bad


# ---- files --------------------------------------------------------------------------------------------------------


Assemble = Callable[[Path, list[str], Embedder, list[Path]], None]
"""Writes names and the embedder's vectors, from parts, to a file; and the hash of their map, if they have one."""


def _vectors(parts: list[Path]) -> Iterator[NDArray[np.float32]]:
    for part in parts:
        with open_npz(part) as file:
            if len(file.read("indices")):
                yield file.read("vectors")


def _format(path: Path) -> Assemble:
    """What writes a file of this ending; asked before the work, so that nothing is embedded in vain."""
    if path.suffix == ".npz":
        return _npz
    if path.suffix != ".parquet":
        raise FeaturesWriteError(
            f"unknown file format: {path}", expected="a name ending in .npz or .parquet", found=path.name
        )
    if find_spec("pyarrow") is None:
        raise MissingExtraError(
            f"cannot write {path}: pyarrow is not installed",
            todo="pip install 'selfmask[parquet]', or choose a name ending in .npz",
        )
    return _parquet


def _npz(path: Path, names: list[str], embedder: Embedder, parts: list[Path]) -> None:
    """`names` and `vectors`, uncompressed, as numpy.savez would write them, but without holding them in memory.

    Arrays that are no vectors are `features` [images, ...].
    """
    shape = (len(names), *(embedder.shape or (embedder.width,)))
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with _assembled(path, parts) as file, zipfile.ZipFile(file, "w") as archive:
        with _member(archive, "names") as member:
            np.lib.format.write_array(member, np.array(names, np.str_), allow_pickle=False)
        with _member(archive, "features" if embedder.shape else "vectors") as member:
            np.lib.format.write_array_header_1_0(member, header)
            for vectors in _vectors(parts):
                member.write(np.ascontiguousarray(vectors, "<f4").data)
        if embedder.map is not None:
            with _member(archive, "map") as member:
                np.lib.format.write_array(member, np.array(embedder.map.sha256), allow_pickle=False)


def _parquet(path: Path, names: list[str], embedder: Embedder, parts: list[Path]) -> None:
    """Columns `name` (string) and `vector` (list of float32, of fixed size); a row group a part.

    Arrays that are no vectors are flattened to `features`; the schema's metadata has their shape.
    """
    import pyarrow as pa  # of an extra
    import pyarrow.parquet as pq

    width = embedder.width
    notes = {} if embedder.map is None else {"selfmask.map": embedder.map.sha256}
    notes |= {"selfmask.shape": json.dumps(embedder.shape)} if embedder.shape else {}
    column = "features" if embedder.shape else "vector"
    fields = [("name", pa.string()), (column, pa.list_(pa.float32(), width))]
    schema = pa.schema(fields, metadata=notes or None)
    with _assembled(path, parts) as file, pq.ParquetWriter(file, schema, use_dictionary=False) as writer:
        start = 0
        for vectors in _vectors(parts):
            own = pa.array(names[start : (start := start + len(vectors))], pa.string())
            rows = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), width)
            writer.write_table(pa.table([own, rows], schema=schema))


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    """A ZipInfo of its own has no date: the same vectors give the same bytes, and a clock before 1980 is no error."""
    return archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True)


@contextmanager
def _assembled(path: Path, parts: list[Path]) -> Iterator[IO[bytes]]:
    """The finished file: made among the parts, then put in place in one step."""
    with replacing(path, beside=parts[0].parent) as file:
        yield file


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        yield
    except FeaturesWriteError:
        raise
    except OSError as error:
        raise FeaturesWriteError(
            f"cannot write {path}",
            expected="a file in a writable folder, on a disk with free space",
            **unwritable(error),
        ) from error
