"""Decoded images, kept in memory when they fit."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import BadImageError, ConfigError, NoImagesError, TooManyBadImagesError
from ..memory import memory_budget
from .disk import DiskCache, KeptOnDisk, Writer
from .resizing import resize
from .sources import Images

_PROBE = 64  # images from which the size of all is estimated
_WAVE = 32  # images a thread decodes between two looks at how it goes
_BLOCK = 256 << 20  # bytes; a few large blocks travel well to other processes, many small tensors do not
_ENOUGH = 100  # images seen before the share of bad ones means something


class ImageStore(Dataset[Tensor]):
    """Images reduced to the size that training needs, decoded once if they fit in memory, else when asked for.

    `store[i]` is uint8 [3, H, W], not to be written into. Larger images are reduced until their shorter side is
    `side`, smaller ones are left. The next good image, round the end if need be, is given in place of one that cannot
    be read; `place(i)` is the number of the image that `store[i]` really is. So the store is the same whether it is
    `cached` or not. `names` and `labels` are of all images, good or bad: the label of `store[i]` is
    `labels[place(i)]`. More than `max_bad` bad images raise TooManyBadImagesError: at once when cached, else when
    those seen so far make it clear. Threads may share a store; it can be pickled.

    memory: bytes to use at most; by default half of what is available, divided among the processes of a run.
    workers: threads that decode; one a processor by default.
    progress: called now and then with the number of images decoded and of all.
    content: the identity of the images; with it, those that do not fit in memory are looked for on the disk.
    holds: whether the images still have that identity; with it, they are put there, for this run and later ones.
    """

    def __init__(
        self,
        images: Images,
        *,
        side: int,
        memory: int | None = None,
        max_bad: float = 0.05,
        workers: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        content: str | None = None,
        holds: Callable[[], bool] | None = None,
    ) -> None:
        if side < 1:
            raise ConfigError("side must be at least 1 pixel", found=side)
        if not 0 <= max_bad <= 1:
            raise ConfigError("max_bad is out of range", expected="a share from 0 to 1", found=max_bad)
        self.side, self.max_bad = side, max_bad
        self.workers = workers or _processors()
        self.names, self.labels, self.classes = images.names, images.labels, images.classes
        self._images: Images | None = images
        self._seen: set[int] = set()
        self._failed: dict[int, tuple[str, str]] = {}
        self._bytes = 0  # of all, decoded, by an estimate
        if memory is None:
            memory = memory_budget(psutil.virtual_memory().available)
        self._kept: _Kept | KeptOnDisk | None = self._keep_all(memory, progress)
        if self._kept is None and content is not None and memory > 0:
            self._kept = self._keep_on_disk(DiskCache(content, side), holds, progress)
        if self._kept is not None:
            self._images = None  # not needed any more, and arrays would be in memory twice

    @property
    def cached(self) -> bool:
        """Whether all images are decoded, in memory or on the disk."""
        return self._kept is not None

    @property
    def bad(self) -> list[tuple[str, str]]:
        """Name and reason of each image found unreadable so far: all of them when cached, else those this process met.

        What the worker processes of a DataLoader meet stays with them.
        """
        return [entry for _, entry in sorted(self._failed.copy().items())]

    @property
    def tensor(self) -> Tensor | None:
        """All images as one uint8 tensor [N, 3, H, W], row i being `store[i]`, if they are cached and of one size."""
        return None if self._kept is None else self._kept.tensor

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> Tensor:
        if isinstance(self._kept, KeptOnDisk):
            return self._kept[self.place(i)]
        if self._kept is not None:
            return self._kept[i]
        for candidate in self._from(i):
            image = self._load(candidate)
            self._check_share_seen()
            if image is not None:
                return image
        raise self._none_left()

    def batch(self, indices: Sequence[int]) -> list[Tensor]:
        """The images of these indices, in their order."""
        if (whole := self.tensor) is not None:
            return list(whole[torch.as_tensor(indices, dtype=torch.long)])
        if self.cached:
            return [self[i] for i in indices]
        with ThreadPoolExecutor(self.workers) as pool:  # made anew: a pool would survive neither fork nor pickle
            return list(pool.map(self.__getitem__, indices))

    def place(self, i: int) -> int:
        """The number of the image that `store[i]` is: i, or that of the next good image if i is bad.

        It is known, and so costs nothing, when the store is cached or the image was asked for before.
        """
        for candidate in self._from(i):
            known = candidate in self._seen
            if candidate not in self._failed and (known or self._load(candidate) is not None):
                return candidate
        raise self._none_left()

    def _from(self, i: int) -> Iterator[int]:
        """All numbers from i on, and round the end."""
        count = len(self)
        first = range(count)[i]
        return itertools.chain(range(first, count), range(first))

    def _keep_all(self, memory: int, progress: Callable[[int, int], None] | None) -> _Kept | None:
        """Decode everything; None if that does not fit in `memory`, if possible seen from some images."""
        if memory <= 0:
            return None
        count = len(self)
        with ThreadPoolExecutor(self.workers) as pool:
            sample = pool.map(self._load, range(0, count, -(-count // _PROBE)))
            shapes = [image.shape for image in sample if image is not None]
            total = self._bytes = sum(shape.numel() for shape in shapes) * count // max(len(shapes), 1)
            if total > memory:
                return None
            kept = _Kept(total if len(set(shapes)) == 1 else min(total, _BLOCK), memory)
            due = 0  # images to keep: bad ones wait for the next good one
            wave = _WAVE * self.workers  # in waves, so that Ctrl-C and too many bad images end it soon
            for start in range(0, count, wave):
                stop = min(start + wave, count)
                for image in pool.map(self._load, range(start, stop)):
                    due += 1
                    if image is not None:
                        if not kept.append(image, due):
                            return None
                        due = 0
                self._check_share(of=count)
                if progress is not None:
                    progress(stop, count)
        if len(kept) == 0:
            raise self._none_left()
        if not kept.append(kept[0], due):
            return None
        kept.trim()
        return kept

    def _keep_on_disk(
        self, disk: DiskCache, holds: Callable[[], bool] | None, progress: Callable[[int, int], None] | None
    ) -> KeptOnDisk | None:
        """The file of an earlier run, or a new one; None if there is no room for it, or another process makes it."""
        count = len(self)
        kept = disk.read(count)
        if kept is None and holds is not None and disk.fits(self._bytes):
            with contextlib.suppress(OSError), disk.writing() as writer:  # a full disk: then without it
                if writer is not None:
                    self._write(writer, progress)
                    if holds():
                        writer.close(self._failed)
            kept = disk.read(count)
        if kept is not None:
            self._failed, self._seen = dict(kept.bad), set(range(count))
            self._check_share(of=count)
        return kept

    def _write(self, writer: Writer, progress: Callable[[int, int], None] | None) -> None:
        count, wave = len(self), _WAVE * self.workers
        with ThreadPoolExecutor(self.workers) as pool:
            for start in range(0, count, wave):
                stop = min(start + wave, count)
                for image in pool.map(self._load, range(start, stop)):
                    writer.add(image)
                self._check_share(of=count)
                if progress is not None:
                    progress(stop, count)

    def _check_share(self, of: int) -> None:
        if len(self._failed) / of > self.max_bad:
            raise self._too_many(of=of)

    def _load(self, i: int) -> Tensor | None:
        """One image at its reduced size, or None if it is bad."""
        if i in self._failed:
            return None
        assert self._images is not None
        try:
            image = self._images.load(i, near=self.side)
        except BadImageError as error:
            self._failed[i] = (self.names[i], str(error.found or error.what))
            self._seen.add(i)  # in this order, for other threads: what is seen and has not failed is good
            return None
        self._seen.add(i)
        height, width = image.shape[1:]
        if (shorter := min(height, width)) > self.side:
            image = resize(image, self.side * height // shorter, self.side * width // shorter, "bicubic")
        return image

    def _check_share_seen(self) -> None:
        """Raise if too many of the images seen so far are bad, beyond what chance explains while there are others."""
        seen, count = len(self._seen), len(self)
        chance = 0.0 if seen == count else 3 * math.sqrt(self.max_bad * seen)  # three standard deviations
        if seen >= min(_ENOUGH, count) and (len(self._failed) - chance) / seen > self.max_bad:
            raise self._too_many(of=seen)

    def _too_many(self, *, of: int) -> TooManyBadImagesError:
        return TooManyBadImagesError(
            f"{len(self._failed):,} of {of:,} images cannot be read",
            expected=f"at most {self.max_bad:.1%}",
            found=self._examples(),
            todo="repair or remove them, or allow a larger share: --max-bad 0.5 (in Python: max_bad=0.5)",
            bad=self.bad,
        )

    def _none_left(self) -> NoImagesError:
        return NoImagesError(f"none of the {len(self):,} images can be read", found=self._examples())

    def _examples(self) -> str:
        bad = self.bad
        more = [f"... and {len(bad) - 10:,} more"] if len(bad) > 10 else []
        return "\n            ".join([*(f"{name}: {reason}" for name, reason in bad[:10]), *more])


class _Kept:
    """Images of any size, packed one after the other into a few large blocks."""

    def __init__(self, expected: int, limit: int) -> None:
        self.bytes = 0
        self._expected, self._limit = expected, limit
        self._blocks: list[Tensor] = []
        self._used = 0  # of the last block
        self._places: list[tuple[int, int, torch.Size]] = []  # block, start, shape
        self._shapes: set[torch.Size] = set()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: int) -> Tensor:
        block, start, shape = self._places[i]
        return self._blocks[block][start : start + shape.numel()].view(shape)

    def append(self, image: Tensor, times: int) -> bool:
        """Add the image so many times; if that would take more bytes than the limit, say False and add nothing."""
        if self.bytes + times * image.numel() > self._limit:
            return False
        for _ in range(times):  # copies, or the images of one size would not be one tensor
            self._append(image)
        return True

    def _append(self, image: Tensor) -> None:
        size = image.numel()
        if not self._blocks or self._used + size > self._blocks[-1].numel():
            usual = _BLOCK if self._blocks else self._expected
            self._blocks.append(torch.empty(max(size, usual), dtype=torch.uint8))
            self._used = 0
        self._blocks[-1][self._used : self._used + size] = image.flatten()
        self._places.append((len(self._blocks) - 1, self._used, image.shape))
        self._shapes.add(image.shape)
        self._used += size
        self.bytes += size

    def trim(self) -> None:
        """Give back what the last block has too much, unless it is so large that copying it takes much memory."""
        if self._used < self._blocks[-1].numel() <= _BLOCK:
            self._blocks[-1] = self._blocks[-1][: self._used].clone()

    @property
    def tensor(self) -> Tensor | None:
        if len(self._shapes) != 1 or len(self._blocks) != 1:
            return None
        (shape,) = self._shapes
        return self._blocks[0][: self.bytes].view(len(self), *shape)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
