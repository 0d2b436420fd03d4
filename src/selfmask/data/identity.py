"""Which images these are: one hash that tells any set of images from any other, on every machine.

And whether they are still the same, after a run that takes hours.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ..errors import BadImageError, ImagesChangedError
from .images import MAX_PIXELS
from .names import update_with_names
from .records import RecordImages
from .sources import ArrayImages, FileImages, Images

SHORT = 8  # bytes that tell a few million images apart
_WAVE = 512  # images hashed at a time: all at once would be a task in memory for each
_TASK = 32  # images that a thread takes at once: small ones are hashed sooner than given to a thread


def identity(images: Images, progress: Callable[[int, int], None] | None = None) -> str:
    """A hash of names, labels, classes and the content of every image: another one if any of them is another.

    Content is the bytes of a file, or of a record in one, the pixels of an array, and of other data sets the decoded
    pixels. Paths and times do not count, so that the same images have the same identity in another place. What is too
    large to be read is decided by a limit, so another limit than the usual one is another identity.
    """
    limit = [] if images.max_pixels == MAX_PIXELS else [images.max_pixels]
    total = hashlib.sha256(b"[")
    update_with_names(total, images.names)
    total.update(f", {json.dumps([images.labels, images.classes, *limit])[1:]}".encode())
    known = bytearray()
    for done, each in enumerate(_digests(images, range(len(images))), 1):
        total.update(each)
        known += each[:SHORT]
        if progress is not None and (done % _WAVE == 0 or done == len(images)):
            progress(done, len(images))
    images.hashes = bytes(known)
    return total.hexdigest()


def short_hashes(images: Images) -> bytes:
    """The first eight bytes of the hash of each image's content, as `identity` last found it, if it was asked."""
    if images.hashes is not None:
        return images.hashes
    return b"".join(each[:SHORT] for each in _digests(images, range(len(images))))


class Unchanged:
    """Images as they were at one moment. `content` is their identity then; `holds` says whether they still are these.

    To look costs little: files are read again only if the file system says that something was done to one of them.
    """

    def __init__(self, images: Images) -> None:
        self._images, self._stamps = images, stamps(images)  # in this order: what changes while it is read is seen, too
        self.content = identity(images)

    def holds(self) -> bool:
        if (now := stamps(self._images)) != self._stamps:
            if identity(self._images) != self.content:
                return False
            self._stamps = now
        return True

    def check(self) -> None:
        if not self.holds():
            raise ImagesChangedError(
                "images were changed while they were in use",
                todo="put them back and continue (--resume, or the same command again), or start again: --out",
            )


def digest(images: Images, numbers: Sequence[int]) -> str:
    """A hash of the content of some images."""
    total = hashlib.sha256()
    for each in _digests(images, numbers):
        total.update(each)
    return total.hexdigest()


def stamps(images: Images, numbers: Sequence[int] | None = None) -> str:
    """A hash of what the file system says of these images, all by default: another one if a file was written to.

    Time of the last change of a file cannot be set, unlike that of the last writing. Nothing is known of images that
    are no files; they do not change by themselves.
    """
    total, shards = hashlib.sha256(), dict[tuple[int, int], RecordImages]()
    for number in range(len(images)) if numbers is None else numbers:
        inner, place = images.origin(number)
        if isinstance(inner, RecordImages):
            shards[id(inner), inner.shard(place)] = inner
        if isinstance(inner, FileImages):
            try:
                found = os.stat(inner.files[place])  # noqa: PTH116 - a Path for each would take longer than this
                total.update(f"{found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}\n".encode())
            except OSError as error:
                total.update(f"{error.errno}\n".encode())
    for (_, shard), inner in shards.items():
        total.update(f"{inner.stamp(shard)}\n".encode())
    return total.hexdigest()


def _digests(images: Images, numbers: Sequence[int]) -> Iterator[bytes]:
    # hashlib and the system's file reads let go of the interpreter lock, so threads use all cores.
    with ThreadPoolExecutor(min(8, torch.get_num_threads())) as pool:
        for start in range(0, len(numbers), _WAVE):
            wave = numbers[start : start + _WAVE]
            tasks = [wave[first : first + _TASK] for first in range(0, len(wave), _TASK)]
            for found in pool.map(lambda task: [_content(images, number) for number in task], tasks):
                yield from found


def _of_file(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
        return hashlib.sha256(b"bad: not a file").digest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _content(images: Images, number: int) -> bytes:
    images, number = images.origin(number)
    try:
        if isinstance(images, FileImages):
            return _of_file(Path(images.files[number]))
        if isinstance(images, RecordImages):
            return images.sha256(number)
        if isinstance(images, ArrayImages):
            pixels = images.pixels[number]
            return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()
        image = images[number]
    except BadImageError as error:
        return hashlib.sha256(f"bad: {error.found}".encode()).digest()
    except OSError as error:
        return hashlib.sha256(f"bad: {error.strerror}".encode()).digest()
    return hashlib.sha256(repr(tuple(image.shape)).encode() + image.contiguous().numpy().tobytes()).digest()
