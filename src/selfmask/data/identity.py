"""Which images these are: one hash that tells any set of images from any other, on every machine."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ..errors import BadImageError
from .images import MAX_PIXELS
from .sources import ArrayImages, FileImages, Images

SHORT = 8  # bytes that tell a few million images apart
_WAVE = 512  # images hashed at a time: all at once would be a task in memory for each


def identity(images: Images, progress: Callable[[int, int], None] | None = None) -> str:
    """A hash of names, labels, classes and the content of every image: another one if any of them is another.

    Content is the bytes of a file, the pixels of an array, and of other data sets the decoded pixels. Paths and times
    do not count, so that the same images have the same identity in another place. What is too large to be read is
    decided by a limit, so another limit than the usual one is another identity.
    """
    limit = [] if images.max_pixels == MAX_PIXELS else [images.max_pixels]
    total = hashlib.sha256(json.dumps([images.names, images.labels, images.classes, *limit]).encode())
    known = bytearray()
    for done, digest in enumerate(_digests(images), 1):
        total.update(digest)
        known += digest[:SHORT]
        if progress is not None and (done % _WAVE == 0 or done == len(images)):
            progress(done, len(images))
    images.hashes = bytes(known)
    return total.hexdigest()


def short_hashes(images: Images) -> bytes:
    """The first eight bytes of the hash of each image's content, as `identity` last found it, if it was asked."""
    return b"".join(digest[:SHORT] for digest in _digests(images)) if images.hashes is None else images.hashes


def _digests(images: Images) -> Iterator[bytes]:
    # hashlib and the system's file reads let go of the interpreter lock, so threads use all cores.
    with ThreadPoolExecutor(min(8, torch.get_num_threads())) as pool:
        for start in range(0, len(images), _WAVE):
            numbers = range(start, min(start + _WAVE, len(images)))
            yield from pool.map(lambda number: _content(images, number), numbers)


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
        if isinstance(images, ArrayImages):
            pixels = images.pixels[number]
            return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()
        image = images[number]
    except BadImageError as error:
        return hashlib.sha256(f"bad: {error.found}".encode()).digest()
    except OSError as error:
        return hashlib.sha256(f"bad: {error.strerror}".encode()).digest()
    return hashlib.sha256(repr(tuple(image.shape)).encode() + image.contiguous().numpy().tobytes()).digest()
