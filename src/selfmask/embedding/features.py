"""Files of vectors: written part by part, so that a run cut short goes on where it was, to the identical file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import secrets
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import checked
from ..data import Images
from ..data.identity import identity
from ..errors import EvaluationError, FeaturesWriteError, MissingExtraError
from .embedder import Embedder
from .vectors import EmbeddedBatch, Progress, embed_batches

_PART = 2048  # images between two saves
_OURS = re.compile(r"[0-9a-f]{12}(-\d{6}\.npz|\.json)|.*\.tmp")  # names in the folder of parts


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
) -> Written:
    """Embed all images into `path`, a .parquet or .npz file of names and vectors.

    Finished parts go to `PATH.partial`; killed at any moment, the same call goes on after the last of them. The
    file appears whole, at the end. `say` is told where an earlier run could be used, and where it could not.
    """
    assemble = _format(path)
    with _disk_errors(path):
        parts = _parts(path, _about(embedder, images, batch_size), len(images), batch_size, say)
        size, total = _per_part(batch_size), len(images)
        numbers = [range(start, min(start + size, total)) for start in range(0, total, size)]
        todo = [number for number, part in enumerate(parts) if not _is_whole(part, numbers[number])]
        resumed = todo[0] * _per_part(batch_size) if todo else len(images)
        if resumed:
            say(f"{resumed:,} of {len(images):,} images were embedded already: continuing with the rest")
        if todo:
            batches = embed_batches(
                embedder.module([embedder.variant]),
                images,
                embedder.preprocessing,
                batch_size=batch_size,
                workers=workers,
                start=resumed,
            )
            with closing(batches):
                a_part = _per_part(batch_size) // batch_size
                _write_parts(parts[todo[0] :], batches, a_part, resumed, len(images), progress)
        names, bad = _outcome(parts, images)
        assemble(path, names, embedder.width, parts)
        _clear(_folder(path))
    return Written(len(names), embedder.width, resumed, bad)


# ---- parts --------------------------------------------------------------------------------------------------------


def _per_part(batch_size: int) -> int:
    """Whole batches, so that a resumed run cuts the images into the same batches: outputs depend on them, slightly."""
    return max(1, _PART // batch_size) * batch_size


def _folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _about(embedder: Embedder, images: Images, batch_size: int) -> dict[str, Any]:
    """What makes the vectors what they are. Work of a run that differs in any of this cannot be used."""
    return {"model": embedder.fingerprint(embedder.variant), "images": identity(images), "batch size": batch_size}


def _parts(path: Path, about: dict[str, Any], images: int, batch_size: int, say: Callable[[str], None]) -> list[Path]:
    """Where the parts of this run are, or will be. What an earlier, other run left is thrown away."""
    folder = _folder(path)
    text = json.dumps(about, indent=2)
    # Each part bears the identity of its run, so that two runs at once can never mix.
    run = hashlib.sha256(text.encode()).hexdigest()[:12]
    parts = [folder / f"{run}-{number:06d}.npz" for number in range(-(-images // _per_part(batch_size)))]
    if folder.exists() and not (folder / f"{run}.json").exists():
        before = [_words(other) for other in sorted(folder.glob("*.json"))]
        differs = sorted({key for other in before for key in about if other.get(key) != about[key]})
        what = ", ".join(differs) or "unknown"
        say(f"{folder} holds partial results for other inputs ({what}): starting from the beginning")
        _clear(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _atomic(folder / f"{run}.json") as file:
        file.write(text.encode())
    return parts


def _words(file: Path) -> dict[str, Any]:
    """What an earlier run said of itself; nothing, if it cannot be read."""
    try:
        return checked.mapping(checked.document(checked.content(file)))
    except (OSError, ValueError):
        return {}


def _write_parts(
    parts: list[Path],
    batches: Iterator[EmbeddedBatch],
    batches_a_part: int,
    done: int,
    total: int,
    progress: Progress | None,
) -> None:
    for path in parts:
        part = list[EmbeddedBatch]()
        for batch in batches:
            part.append(batch)
            done += len(batch.indices) + len(batch.bad)
            if progress is not None:
                progress(done, total)
            if len(part) == batches_a_part:
                break
        bad = [entry for batch in part for entry in batch.bad]
        with _atomic(path) as file:
            np.savez(
                file,
                indices=np.array([number for batch in part for number in batch.indices], np.int64),
                vectors=torch.cat([batch.features for batch in part if batch.indices] or [torch.empty(0, 0)]).numpy(),
                bad=np.array([number for number, _ in bad], np.int64),
                reasons=np.array([reason for _, reason in bad], np.str_),
            )


def _clear(folder: Path) -> None:
    """Remove what we put there, and the folder too if nothing else is in it."""
    for file in folder.iterdir():
        if _OURS.fullmatch(file.name):
            file.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _is_whole(part: Path, numbers: range) -> bool:
    """Whether a part is there and holds what was written, of the images with these numbers.

    All sums are checked, and what does not fit is made anew.
    """
    try:
        with part.open("rb") as opened, np.load(opened) as file:
            indices, vectors, bad, reasons = (file[name] for name in ("indices", "vectors", "bad", "reasons"))
        return bool(
            indices.dtype == bad.dtype == np.int64
            and vectors.dtype == np.float32
            and reasons.dtype.kind == "U"
            and indices.ndim == bad.ndim == reasons.ndim == 1
            and (vectors.ndim, len(vectors), len(bad)) == (2, len(indices), len(reasons))
            and sorted([*indices.tolist(), *bad.tolist()]) == list(numbers)
        )
    except Exception:  # zip, zlib, numpy and its parser of headers raise many kinds on damaged files
        return False


def _outcome(parts: list[Path], images: Images) -> tuple[list[str], list[tuple[str, str]]]:
    """The names of the images that have a vector, and of those that have none, with the reason."""
    names, bad = list[str](), list[tuple[str, str]]()
    for part in parts:
        with np.load(part) as file:
            names += [images.names[number] for number in file["indices"]]
            bad += [(images.names[i], str(why)) for i, why in zip(file["bad"], file["reasons"], strict=True)]
    if not names:
        raise EvaluationError(
            f"none of the {len(images):,} images could be read",
            found="; ".join(f"{name}: {why}" for name, why in bad[:3]),
            todo="check the images that were given",
        )
    return names, bad


# ---- files --------------------------------------------------------------------------------------------------------


Assemble = Callable[[Path, list[str], int, list[Path]], None]
"""Writes names and vectors, of a width and from parts, to a file."""


def _vectors(parts: list[Path]) -> Iterator[NDArray[np.float32]]:
    for part in parts:
        with np.load(part) as file:
            if len(file["indices"]):
                yield file["vectors"]


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


def _npz(path: Path, names: list[str], width: int, parts: list[Path]) -> None:
    """`names` and `vectors`, uncompressed, as numpy.savez would write them, but without holding them in memory."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (len(names), width)}
    with _assembled(path) as file, zipfile.ZipFile(file, "w") as archive:
        # A ZipInfo of its own has no date: the same vectors give the same bytes.
        with archive.open(zipfile.ZipInfo("names.npy"), "w", force_zip64=True) as member:
            np.lib.format.write_array(member, np.array(names, np.str_), allow_pickle=False)
        with archive.open(zipfile.ZipInfo("vectors.npy"), "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(member, header)
            for vectors in _vectors(parts):
                member.write(np.ascontiguousarray(vectors, "<f4").data)


def _parquet(path: Path, names: list[str], width: int, parts: list[Path]) -> None:
    """Columns `name` (string) and `vector` (list of float32, of fixed size); a row group a part."""
    import pyarrow as pa  # of an extra
    import pyarrow.parquet as pq

    schema = pa.schema([("name", pa.string()), ("vector", pa.list_(pa.float32(), width))])
    with _assembled(path) as file, pq.ParquetWriter(file, schema, use_dictionary=False) as writer:
        start = 0
        for vectors in _vectors(parts):
            own = pa.array(names[start : (start := start + len(vectors))], pa.string())
            rows = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), width)
            writer.write_table(pa.table([own, rows], schema=schema))


@contextmanager
def _assembled(path: Path) -> Iterator[IO[bytes]]:
    """The finished file: made among the parts, then put in place in one step."""
    with _atomic(_folder(path) / "all", path) as file:
        yield file


@contextmanager
def _atomic(path: Path, target: Path | None = None) -> Iterator[IO[bytes]]:
    """Write beside, flush to disk, then rename: whatever happens, the file is there whole, or not at all."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target or path)
    finally:
        with suppress(OSError):
            temporary.unlink()


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
            found=error.strerror or error,
            todo="free some space or choose another folder, then run the same command again to continue",
        ) from error
