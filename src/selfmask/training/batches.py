"""The batch of every step, as a function of the step alone: any process can make any batch at any time."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data import ImageStore
from ..data.views import MultiCrop
from ..errors import SelfmaskError, TooFewImagesError
from .helpers import made_ahead
from .processes import Processes
from .seeds import generator

Batch = list[Tensor] | tuple[list[Tensor], Tensor]
"""Views, one tensor a crop; with labels, or the numbers of their images among those used, if they are asked for."""


class Steps(Dataset[Batch]):
    """Item t is the batch of step t: epochs are permutations of all images, the last incomplete batch is left out.

    With several processes each takes its part of the same global batch. Only images `among` these numbers are used, if
    given.
    """

    def __init__(
        self,
        store: ImageStore,
        views: MultiCrop,
        *,
        batch_size: int,
        seed: int,
        processes: Processes,
        with_labels: bool = False,
        with_numbers: bool = False,
        among: Sequence[int] | None = None,
    ) -> None:
        self.among = torch.arange(len(store)) if among is None else torch.tensor(among)
        if len(self.among) < batch_size:
            raise TooFewImagesError(
                "there are fewer images than a batch needs",
                expected=f"at least {batch_size}",
                found=f"{len(self.among)} image(s)" + (", not counting those held out" if among is not None else ""),
                todo=f"add images, or use a smaller batch: --batch-size {max(2, len(self.among) // 2)}",
            )
        self.store, self.views, self.batch_size, self.seed = store, views, batch_size, seed
        self.part = processes.part(batch_size)
        self.labels = torch.tensor(store.labels) if with_labels else None
        self.with_numbers = with_numbers

    @property
    def per_epoch(self) -> int:
        return len(self.among) // self.batch_size

    def progress_by_epoch(self, step: int, steps: int) -> float:
        """How far training has come, from 0 in the first epoch to 1 in the last; by step, if there is only one."""
        last = (steps - 1) // self.per_epoch
        return (step // self.per_epoch) / last if last else step / steps

    def __getitem__(self, step: int) -> Batch:
        epoch, place = divmod(step, self.per_epoch)
        numbers = self._order(epoch)[place * self.batch_size : (place + 1) * self.batch_size][self.part]
        chosen = self.among[numbers].tolist()
        draws = self.views.draw(self.batch_size, generator(self.seed, "views", step))
        views = self.views(self.store.batch(chosen), draws[self.part])
        views = [view.contiguous(memory_format=torch.channels_last) for view in views]
        if self.with_numbers:
            return views, numbers
        return views if self.labels is None else (views, self.labels[[self.store.place(i) for i in chosen]])

    @lru_cache(maxsize=2)  # noqa: B019 - lives as long as the run
    def _order(self, epoch: int) -> Tensor:
        return torch.randperm(len(self.among), generator=generator(self.seed, "order", epoch))

    @contextmanager
    def between(self, start: int, stop: int, workers: int) -> Iterator[Iterator[Batch]]:
        """Within, the batches of steps start to stop - 1, made ahead by worker processes if there are any."""
        items = self if workers == 0 else _Sent(self)
        loader: DataLoader[Any] = DataLoader(
            items, batch_size=None, sampler=range(start, stop), num_workers=workers, worker_init_fn=_quiet_worker
        )
        with made_ahead(loader) as batches:
            yield _received(batches) if workers else batches


class _Sent(Dataset[Any]):
    """Errors of ours as items: the loader would make text of them, traceback and all."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def __getitem__(self, step: int) -> Batch | SelfmaskError:
        try:
            return self.steps[step]
        except SelfmaskError as error:
            return error


def _received(items: Iterator[Batch | SelfmaskError]) -> Iterator[Batch]:
    for item in items:
        if isinstance(item, SelfmaskError):
            raise item
        yield item


def _quiet_worker(_: int) -> None:
    """Where signals cannot be kept from a new process, it ignores Ctrl-C itself; the main one decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
