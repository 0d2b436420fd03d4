"""Images to vectors: decoding and resizing in threads, one forward pass a batch, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..data import Images
from ..data.pixels import fit, normalised
from ..errors import BadImageError, ConfigError
from ..preprocessing import Preprocessing
from ..running import as_vectors, evaluating

_LARGE = 4  # so many times the target's pixels, and an image is made small as soon as it is decoded


class ImageSource(Protocol):
    """Anything with a length that gives uint8 images [3, H, W] by number, and a `BadImageError` for a bad one."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Tensor: ...


class EmbeddedBatch(NamedTuple):
    """The vectors of some images: their numbers, a row for each, and what was left out and why."""

    indices: list[int]
    features: Tensor
    bad: list[tuple[int, str]]


Progress = Callable[[int, int], None]
"""Called with how many images are done, and how many there are."""


def embed(
    model: nn.Module,
    images: ImageSource,
    preprocessing: Preprocessing,
    *,
    batch_size: int = 64,
    workers: int | None = None,
    progress: Progress | None = None,
    skip_bad: bool = True,
) -> tuple[Tensor, list[int]]:
    """Vectors of all images as float32 rows, and the numbers of the images they belong to (bad ones are left out)."""
    rows, kept = torch.empty(0, 0), list[int]()
    batches = embed_batches(model, images, preprocessing, batch_size=batch_size, workers=workers, skip_bad=skip_bad)
    done = 0
    for indices, features, bad in batches:
        if not kept:
            rows = torch.empty(len(images), features.shape[1])
        rows[len(kept) : len(kept) + len(indices)] = features
        kept += indices
        done += len(indices) + len(bad)
        if progress is not None:
            progress(done, len(images))
    return rows[: len(kept)], kept


def embed_batches(
    model: nn.Module,
    images: ImageSource,
    preprocessing: Preprocessing,
    *,
    batch_size: int = 64,
    workers: int | None = None,
    skip_bad: bool = True,
    start: int = 0,
    stop: int | None = None,
) -> Generator[EmbeddedBatch, None, None]:
    """The same, a batch at a time and in order, from image number `start` on, to `stop` if given.

    A pool of `workers` threads decodes and resizes, at most one batch each ahead of the model.
    """
    if batch_size < 1:
        raise ConfigError("the batch size must be at least 1", found=batch_size)
    workers = workers or min(8, torch.get_num_threads())
    end = len(images) if stop is None else stop
    waiting: deque[Future[_Prepared]] = deque()
    pool = ThreadPoolExecutor(workers, "decode")
    with evaluating(model):
        try:
            for first in range(start, end, batch_size):
                numbers = range(first, min(first + batch_size, end))
                waiting.append(pool.submit(_prepare, images, numbers, preprocessing, skip_bad))
                if len(waiting) > workers:
                    yield _run(model, waiting.popleft().result(), preprocessing)
            while waiting:
                yield _run(model, waiting.popleft().result(), preprocessing)
        finally:  # also where the caller stops half-way
            pool.shutdown(cancel_futures=True)


class _Prepared(NamedTuple):
    indices: list[int]
    pixels: Tensor | None
    bad: list[tuple[int, str]]


def _prepare(images: ImageSource, numbers: Sequence[int], preprocessing: Preprocessing, skip_bad: bool) -> _Prepared:
    """Decode and fit the images of one batch."""
    kept, ready, bad = list[int](), list[Tensor](), list[tuple[int, str]]()
    large = _LARGE * preprocessing.size[0] * preprocessing.size[1]
    for number in numbers:
        try:
            image = _load(images, number, preprocessing)
        except BadImageError as error:
            if not skip_bad:
                raise
            bad.append((number, str(error.found or error.what)))
            continue
        kept.append(number)
        ready.append(fit(image, preprocessing) if image.shape[-2] * image.shape[-1] > large else image)
    if not ready:
        return _Prepared(kept, None, bad)
    if len({image.shape for image in ready}) == 1:  # one call for all: what small images cost is mostly the calls
        return _Prepared(kept, fit(torch.stack(ready), preprocessing), bad)
    return _Prepared(kept, torch.stack([fit(image, preprocessing) for image in ready]), bad)


def _load(images: ImageSource, number: int, preprocessing: Preprocessing) -> Tensor:
    # Large photographs are decoded at a fraction of their size, still twice the target's: several times faster.
    return images.load(number, near=max(preprocessing.size)) if isinstance(images, Images) else images[number]


def _run(model: nn.Module, prepared: _Prepared, preprocessing: Preprocessing) -> EmbeddedBatch:
    if prepared.pixels is None:
        return EmbeddedBatch([], torch.empty(0, 0), prepared.bad)
    return EmbeddedBatch(prepared.indices, run_batch(model, prepared.pixels, preprocessing), prepared.bad)


def run_batch(model: nn.Module, images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """The vectors of one batch, float32 on the CPU: of uint8 images [n, 3, H, W] that have been fitted."""
    with torch.inference_mode():
        parameter = next(model.parameters(), torch.empty(0))
        # On a CPU, convolutional networks run faster in this layout (ResNet-18 about 1.5 times); a ViT does not care.
        pixels = images.to(parameter.device, torch.float32, memory_format=torch.channels_last)
        features = model(normalised(pixels, preprocessing).to(parameter.dtype))
    # Cloned outside of inference mode: an ordinary tensor, that can be trained on.
    return as_vectors(features).float().cpu().clone()
