"""Thumbnails of a collection: JPEGs one after the other in a single file, found by where each ends."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ..data import Images
from ..data.identity import digest
from ..embedding.vectors import Progress
from ..errors import BadImageError, ImagesChangedError, MaskFileError
from ..files import replacing, write_atomically
from ..maskfile import open_container
from ..maskfile.container import container_bytes

MAX_BYTES = 1 << 17
"""Of one thumbnail."""
_PART = 1024  # images between two saves
_QUALITY = 80


def jpeg(image: Tensor, side: int) -> bytes:
    """A uint8 image [3, H, W], made smaller to fit `side` pixels each way, never larger."""
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def write_thumbnails(
    path: Path, work: Path, images: Images, numbers: Sequence[int], *, side: int, progress: Progress | None = None
) -> Tensor:
    """Thumbnails of these images, in this order, in a file; where each of them ends.

    Finished parts are kept in the folder `work`: cut short, the same call goes on after the last of them.
    """
    parts = [numbers[start : start + _PART] for start in range(0, len(numbers), _PART)]
    total, ends, at, done = len(numbers), list[Tensor](), 0, 0
    with replacing(path, beside=work) as file, ThreadPoolExecutor(min(8, torch.get_num_threads()), "thumb") as pool:
        for number, part in enumerate(parts):
            place = work / f"thumbnails-{number:06d}.safetensors"
            words = f"{side} {digest(images, part)}"  # made again where an image is another
            found = _read(place, words, len(part))
            if found is None:
                made = list(pool.map(lambda i: _thumbnail(images, i, side), part))
                found = b"".join(made), torch.tensor([len(each) for each in made]).cumsum(0)
                _write(place, words, *found)
            data, own = found
            file.write(data)
            ends.append(own + at)
            at, done = at + len(data), done + len(part)
            if progress is not None:
                progress(done, total)
    for place in _parts(work):
        place.unlink(missing_ok=True)
    return torch.cat(ends)


def _thumbnail(images: Images, number: int, side: int) -> bytes:
    try:
        return jpeg(images.load(number, near=side), side)
    except BadImageError as error:  # it had a vector a moment ago
        raise ImagesChangedError(
            "images were changed while they were in use", found=error.what, todo="run the same command again"
        ) from error


def _parts(work: Path) -> Iterator[Path]:
    yield from work.glob("thumbnails-*.safetensors")


def _write(place: Path, words: str, data: bytes, ends: Tensor) -> None:
    tensors = {"data": torch.frombuffer(bytearray(data), dtype=torch.uint8), "ends": ends}
    write_atomically(place, container_bytes(tensors, {}, words))


def _read(place: Path, words: str, count: int) -> tuple[bytes, Tensor] | None:
    """What an earlier run kept; None if there is nothing, or it is not of these images."""
    try:
        with open_container(place) as file:
            tensors = file.read(words)
        data, ends = tensors["data"], tensors["ends"]
        return (data.numpy().tobytes(), ends) if len(ends) == count and int(ends[-1]) == len(data) else None
    except (MaskFileError, LookupError):
        return None


class Thumbnails:
    """The file, open; one thumbnail is read at a time, from any thread."""

    def __init__(self, descriptor: int, ends: Tensor) -> None:
        """ends: of each; that they lie within the file is checked here, and what does not fit is a ValueError."""
        self._file, self._ends, self._reading = os.fdopen(descriptor, "rb"), ends, threading.Lock()
        lengths = torch.diff(ends, prepend=ends.new_zeros(1))
        if bool(((lengths <= 0) | (lengths > MAX_BYTES)).any()) or int(ends[-1]) != os.fstat(descriptor).st_size:
            raise ValueError("the thumbnails are not where they should be")

    def __getitem__(self, number: int) -> bytes:
        start = int(self._ends[number - 1]) if number else 0
        with self._reading:
            self._file.seek(start)
            return self._file.read(int(self._ends[number]) - start)

    def __len__(self) -> int:
        return len(self._ends)

    def close(self) -> None:
        self._file.close()


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
