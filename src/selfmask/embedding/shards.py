"""A folder of vectors in shards, which any number of processes write: one data set for whatever reads parquet."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from .. import checked
from ..data import Images, SomeImages
from ..data.names import names_hash
from ..errors import ConfigError, FeaturesWriteError, RunExistsError, RunMismatchError
from ..files import write_atomically
from .embedder import Embedder
from .features import Written, write_features
from .vectors import Progress

# Readers of such folders (pyarrow, Spark, DuckDB's *.parquet) skip names that begin with an underscore.
MANIFEST = "_manifest.json"
_ENTRIES, _PARTIAL = "_shards", "_partial"
_MOST = 99_999  # shards
_LARGEST = 1 << 28  # bytes of what is said of a shard; it names every image that could not be read


@dataclasses.dataclass(frozen=True)
class Shards:
    """Which shards, of how many: `3/8`, or every one: `all/8`. They are counted from 1."""

    chosen: range
    of: int

    @classmethod
    def named(cls, text: str) -> Self:
        found = re.fullmatch(r"(all|[0-9]{1,5})/([0-9]{1,5})", text)
        which, of = (found[1], int(found[2])) if found else ("", 0)
        if not which or not 1 <= of <= _MOST or (which != "all" and not 1 <= int(which) <= of):
            raise ConfigError(
                "--shard names no shard", expected=f"I/N, with I from 1 to N (at most {_MOST:,}), or all/N", found=text
            )
        return cls(range(1, of + 1) if which == "all" else range(int(which), int(which) + 1), of)

    def images(self, number: int, count: int, batch_size: int) -> range:
        """The numbers of the images of one shard: whole batches, so that vectors are those of one process."""
        batches = -(-count // batch_size)
        first, last = (batches * place // self.of * batch_size for place in (number - 1, number))
        return range(first, min(last, count))


@dataclasses.dataclass(frozen=True)
class Sharded:
    """What was written, by shard, and which shards were there already."""

    written: dict[int, Written]
    kept: list[int]
    finished: bool
    """Whether the folder has all its shards now."""


def write_shards(
    folder: Path,
    shards: Shards,
    embedder: Embedder,
    images: Images,
    *,
    batch_size: int = 64,
    resume: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = print,
) -> Sharded:
    """Embed the images of some shards, each into a parquet file of `folder`.

    A shard that was cut short goes on where it was. One that is finished is an error, or, with `resume`, kept: if its
    file is still the one that was written. The manifest says what the vectors are of, and, when all shards are there,
    the rows, bytes and hash of each.
    """
    if (batches := -(-len(images) // batch_size)) < shards.of:
        raise ConfigError(
            "there are more shards than batches",
            expected=f"at most {batches:,} for {len(images):,} images in batches of {batch_size:,}",
            found=f"{shards.of:,} shards",
        )
    about = _about(embedder, images, batch_size, shards.of)
    _begin(folder, about)
    left = missing(folder, shards)
    kept = [number for number in shards.chosen if number not in left]
    if kept and not resume:
        raise RunExistsError(
            f"{folder} has shard {kept[0]}/{shards.of} already",
            todo="--resume keeps the shards that are finished; remove the file to write it again",
        )
    written = {}
    for number in shards.chosen:
        if number not in kept:
            some = SomeImages(images, shards.images(number, len(images), batch_size))
            path = folder / f"{_name(number, shards.of)}.parquet"
            partial = folder / _PARTIAL / path.stem
            written[number] = found = write_features(
                path,
                embedder,
                some,
                batch_size=batch_size,
                workers=workers,
                progress=progress,
                say=say,
                partial=partial,
            )
            _write_json(_entry(folder, number, shards.of), _facts(path) | {"rows": found.rows, "bad": found.bad})
    return Sharded(written, kept, _finish(folder, about))


def missing(folder: Path, shards: Shards) -> list[int]:
    """Those that are not there, or not as they were written."""
    return [number for number in shards.chosen if not _is_whole(folder, number, shards.of)]


def _name(number: int, of: int) -> str:
    return f"{number:05d}-of-{of:05d}"


def _entry(folder: Path, number: int, of: int) -> Path:
    return folder / _ENTRIES / f"{_name(number, of)}.json"


def _about(embedder: Embedder, images: Images, batch_size: int, of: int) -> dict[str, Any]:
    """What all shards must have in common."""
    return {
        "format": 1,
        "model": embedder.fingerprint(embedder.variant),
        "width": embedder.width,
        "map": None if embedder.map is None else embedder.map.sha256,
        "images": len(images),
        "names": names_hash(images.names),
        "max_pixels": images.max_pixels,
        "batch_size": batch_size,
        "of": of,
    }


def _begin(folder: Path, about: dict[str, Any]) -> None:
    """Say what the folder is of, or check that it is of that."""
    before = _read(folder / MANIFEST)
    if before is None:
        _write_json(folder / MANIFEST, about)
    elif differs := [name for name, value in about.items() if before.get(name) != value]:
        raise RunMismatchError(
            f"{folder} has shards of something else",
            expected="the same model, images, batch size and number of shards",
            found=f"another {', '.join(differs)}",
            todo="give another folder: --out",
        )


def _finish(folder: Path, about: dict[str, Any]) -> bool:
    """Complete the manifest if all shards are there. Each process looks after its last shard, so the last one sees all.

    Two that see it write the same.
    """
    entries = []
    for number in range(1, about["of"] + 1):
        if (entry := _known(folder, number, about["of"])) is None:
            return False
        own = {"file": f"{_name(number, about['of'])}.parquet", "rows": entry.get("rows"), "bytes": entry.get("bytes")}
        entries.append(own | {"sha256": entry.get("sha256"), "bad": len(entry.get("bad") or [])})
    _write_json(folder / MANIFEST, about | {"shards": entries})
    with contextlib.suppress(OSError):  # of another process that looks at it, too
        (folder / _PARTIAL).rmdir()
    return True


def _known(folder: Path, number: int, of: int) -> dict[str, Any] | None:
    """What was written down of a shard, if its file is there, and as long as it was."""
    entry, path = _read(_entry(folder, number, of)), folder / f"{_name(number, of)}.parquet"
    there = entry is not None and path.is_file() and path.stat().st_size == entry.get("bytes")
    return entry if there else None


def _is_whole(folder: Path, number: int, of: int) -> bool:
    entry = _known(folder, number, of)
    return entry is not None and _facts(folder / f"{_name(number, of)}.parquet")["sha256"] == entry.get("sha256")


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return checked.mapping(checked.document(checked.content(path, most=_LARGEST), most=_LARGEST))
    except (OSError, ValueError):  # not there, or not whole: then it is written again
        return None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=1).encode(), FeaturesWriteError)
