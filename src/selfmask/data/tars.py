"""Tar files of images, as WebDataset keeps them: `0001.jpg`, and beside it, optionally, its class `0001.cls`.

The members are found once, and where they are is kept for the next time; then any image can be read by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import tarfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import BadImageError, MalformedDataError, NoImagesError, RunWriteError
from ..files import replacing
from .caches import cache_folder, drop_oldest, used_now
from .folders import is_hidden, labels_by_folder
from .images import EXTENSIONS, printable
from .names import Names
from .npz import open_npz
from .places import Place
from .records import RecordImages

_LIMIT = 1 << 30  # bytes of all that is kept
_ENDING = ".tar.npz"
_FORMAT = 1
_BLOCK = 512  # bytes, of which every tar consists
_CLASS = ".cls"
_LONGEST = 32  # bytes of the number of a class
_NONE = -1  # where there is no class
_AT_ONCE = 8  # tars looked through side by side


@dataclasses.dataclass(frozen=True)
class Members:
    """The images of a tar: their names, where their bytes are, and their classes, or -1."""

    names: list[bytes]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64]


class TarImages(RecordImages):
    """The images of some tars, one after the other."""

    own_names = True

    def __init__(self, shards: Sequence[Place], members: Sequence[Members]) -> None:
        joined = _joined(shards, members)
        super().__init__(shards, joined, *_classes(members))
        self.undivided = True
        self._starts = [0, *accumulate(len(each.names) for each in members)]
        self._offsets, self._sizes = (
            np.concatenate([getattr(each, part) for each in members]) for part in ("offsets", "sizes")
        )

    def shard(self, i: int) -> int:
        return bisect_right(self._starts, i) - 1

    def record(self, i: int) -> bytes:
        start, size = int(self._offsets[i]), int(self._sizes[i])
        data = self.shards[self.shard(i)].read(start, start + size)
        if len(data) != size:
            raise BadImageError(f"cannot read {self.names[i]}", found="the tar has become shorter")
        return data


def open_tars(shards: Sequence[Place]) -> TarImages:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        members = list(pool.map(members_of, shards))
    if not any(len(each.names) for each in members):
        raise NoImagesError(
            f"there are no images in {shards[0].name}" + (f" and {len(shards) - 1:,} more" if shards[1:] else ""),
            expected=f"members ending in {' '.join(EXTENSIONS)}",
        )
    return TarImages(shards, members)


def _joined(shards: Sequence[Place], members: Sequence[Members]) -> Names:
    """The names of all images, with that of their tar in front if otherwise two had the same."""
    hashes = [hashlib.blake2b(name, digest_size=8).digest() for each in members for name in each.names]
    if len(np.unique(np.frombuffer(b"".join(hashes), np.uint64))) == len(hashes):
        return Names(name for each in members for name in each.names)
    tars = [shard.name.rpartition("/")[2].encode() for shard in shards]
    return Names(tar + b"/" + name for tar, each in zip(tars, members, strict=True) for name in each.names)


def _classes(members: Sequence[Members]) -> tuple[list[int] | None, list[str] | None]:
    """Labels and classes: by `.cls`, if every image has one; else by the folders in the tars, as elsewhere."""
    labels = np.concatenate([each.labels for each in members])
    if (labels != _NONE).all():
        return labels.tolist(), None
    known = {top for top, below in _tops(members) if below}
    if len(known) < 2 or not all(below for _, below in _tops(members)):
        return None, None
    return labels_by_folder((top for top, _ in _tops(members)), known)


def _tops(members: Sequence[Members]) -> Iterator[tuple[str, str]]:
    """The first part of the path of each image, and a slash if there is another."""
    for each in members:
        for name in each.names:
            top, below, _ = name.decode().partition("/")
            yield top, below


# ---- looking through a tar ----------------------------------------------------------------------------------------


def members_of(tar: Place) -> Members:
    """Its images; found by an earlier look, if the tar is still the same."""
    key = hashlib.sha256(f"{_FORMAT} {tar.name} {tar.stamp()}".encode()).hexdigest()
    path = cache_folder() / "tars" / f"{key}{_ENDING}"
    with contextlib.suppress(Exception):  # zip, zlib and numpy raise many kinds on damaged files
        return _read(path, tar.size())
    found = _looked_through(tar)
    with contextlib.suppress(OSError, RunWriteError):  # then the tar is looked through the next time, too
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(
                file,
                names=np.frombuffer(b"\0".join(found.names), np.uint8),
                offsets=found.offsets,
                sizes=found.sizes,
                labels=found.labels,
            )
        drop_oldest(path.parent, _ENDING, _LIMIT)
    return found


def _read(path: Path, size: int) -> Members:
    with open_npz(path) as file:
        names, *arrays = (file.read(name) for name in ("names", "offsets", "sizes", "labels"))
    members = Members(names.tobytes().split(b"\0") if len(names) else [], *arrays)
    within = (members.offsets >= 0) & (members.sizes >= 0) & (members.offsets + members.sizes <= size)
    if {len(each) for each in arrays} != {len(members.names)} or not within.all():
        raise ValueError("not of this tar")
    used_now(path)
    return members


def _looked_through(tar: Place) -> Members:
    names, places, keys = list[bytes](), list[tuple[int, int]](), list[str]()
    classes: dict[str, int] = {}
    for name, start, size in _members(tar):
        folder, _, own = name.rpartition("/")
        stem, dot, ending = own.partition(".")
        if any(map(is_hidden, name.split("/"))):
            continue
        key = f"{folder}/{stem}"
        if f"{dot}{ending}" == _CLASS:
            with contextlib.suppress(ValueError):  # no number: then there is no class
                classes[key] = int(tar.read(start, start + min(size, _LONGEST)))
        elif Path(own).suffix.lower() in EXTENSIONS:
            names.append(printable(Path(name)).encode())
            places.append((start, size))
            keys.append(key)
    offsets, sizes = np.array(places, np.int64).reshape(-1, 2).T
    labels = np.array([classes.get(key, _NONE) for key in keys], np.int64)
    return Members(names, offsets.copy(), sizes.copy(), labels)


def _members(tar: Place) -> Iterator[tuple[str, int, int]]:
    """Name, start and size of each file in a tar; what is damaged, or cut short, is refused as a whole."""
    count, archive = 0, None
    with tar.open() as stream:
        try:
            archive = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115 - closing it adds nothing
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # else all of them are kept
                if member.isreg() and not member.issparse():
                    count += 1
                    yield member.name.removeprefix("./"), member.offset_data, member.size
            # At anything that is no header, tarfile ends as if it were the end.
            whole = tar.read(archive.offset, archive.offset + _BLOCK) == bytes(_BLOCK)
            why = "no end mark after that"
        except tarfile.TarError as error:
            whole, why = False, str(error)
        if not whole:
            compressed = tar.read(0, 4)[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5")
            raise MalformedDataError(
                f"{tar.name} is " + ("compressed" if compressed else "damaged or cut short"),
                expected="a whole tar, not compressed" if compressed else "a whole tar",
                found=f"{tar.size():,} bytes, {count:,} whole files, {why}",
                todo="unpack it to a .tar" if compressed else "get it again, or leave it out",
            )
