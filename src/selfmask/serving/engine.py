"""The engine: images and the name of a mask in, vectors out. It decodes, queues, batches, switches and runs.

Nothing of HTTP is known here: `app.py` calls it, and so does whoever embeds within a process of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from PIL import Image
from torch import Tensor

from ..backbones import Backbone
from ..data.images import decode_image, to_rgb
from ..data.pixels import fit
from ..errors import BadRequestError, FailedError, LateError, SelfmaskError, TooLargeError
from ..masking.mixing import Mixing
from ..masking.switching import can_pass
from ..shelf import About
from .catalogue import Catalogue
from .config import ServeConfig
from .hot import HotViews
from .metrics import Metrics
from .mixed import MixedPasses
from .models import Model
from .queue import Job, Queue, Ticket, late
from .shelf import FROZEN, Shelf, checked_name, unknown
from .store import Store
from .workers import Workers

Picture = bytes | Tensor | Image.Image
"""An image: the bytes of a file, what `decode_image` made of one (uint8 [3, H, W]), or a Pillow image."""
_log = logging.getLogger(__name__)
_HEALTHY = 1.0  # seconds that a proof of health counts
_DECODERS = 8  # threads at most


class Engine:
    """Vectors of images under any of the masks in a folder.

    >>> engine = Engine(backbone, Path("masks"), ServeConfig())
    >>> with engine:                                       # starts and stops its threads
    ...     vectors = engine.embed("birds", [photo])       # from any thread but that of an event loop
    ...     vectors = await engine.vectors("birds", [photo])
    """

    def __init__(self, backbone: Backbone, masks: Path, config: ServeConfig | None = None) -> None:
        self.config = config = config or ServeConfig()
        self.backbone, self.metrics = backbone, Metrics()
        # In the layout that images come in: else convolutions turn their weights around on every pass, which takes as
        # long as the pass itself where images are few and small. Vectors stay the same to the bit.
        backbone.model.eval().requires_grad_(False).to(memory_format=torch.channels_last)
        self.shelf = Shelf(masks)
        self.catalogue = Catalogue(self.shelf, backbone)
        side = (config.size, config.size) if config.size else backbone.preprocessing.size
        passing = can_pass(backbone.model, side)
        mixing = Mixing.of(backbone.model, side) if config.max_batch > 1 else None
        passes = None if mixing is None else MixedPasses(mixing)
        views = HotViews(backbone.model, config.max_hot, config.threads, self.metrics.expanded, passing=passing)
        self.store = Store(backbone, self.shelf, views, config.packed, config.size, self.metrics.packed, passes=passes)
        self.queue = Queue(config.queue, config.max_batch, config.max_wait_ms / 1000)
        self.metrics.watch(self.queue, self.store)
        self._decoders = ThreadPoolExecutor(min(_DECODERS, config.threads * config.cores), "decode")
        self.workers = Workers(config.threads, config.cores, self.queue, self.metrics)
        self._healthy = float("-inf")
        self._trying: Ticket | None = None
        self.ready = False

    # ---- asking ---------------------------------------------------------------------------------------------------

    def embed(self, name: str, images: Sequence[Picture], *, timeout: float | None = None) -> Tensor:
        """The vectors of images under a mask, float32 [images, width]: for threads without an event loop.

        name: of a mask or cascade, or `frozen` for the backbone alone. Raises errors of `errors.py`:
        `UnknownModelError`, `UnusableModelError`, `BadImageError`, `TooLargeError`, `BusyError`, `LateError`.
        """
        ticket = self.submit(name, images, timeout=timeout)
        try:
            return ticket.future.result(max(0.0, ticket.deadline - time.monotonic()))
        except TimeoutError as error:
            ticket.future.cancel()
            raise error if isinstance(error, LateError) else late() from error

    async def vectors(self, name: str, images: Sequence[Picture], *, timeout: float | None = None) -> Tensor:
        """The same, awaited. Cancelling the task takes what is not run yet out of the queue."""
        return await self.finished(self.submit(name, images, timeout=timeout))

    def submit(
        self, name: str, images: Sequence[Picture], *, timeout: float | None = None, model: Model | None = None
    ) -> Ticket:
        """Line up images: what `embed` and `vectors` wait for. model: that of the name, if it was looked up."""
        if not images:
            raise BadRequestError("there is no image in the request", expected="at least one")
        if len(images) > self.config.max_images:
            raise TooLargeError(
                "there are too many images in the request",
                expected=f"at most {self.config.max_images}",
                found=len(images),
            )
        name = FROZEN if name == self.backbone.name else name  # under two names it is one model
        wanted = self.config.timeout if timeout is None else min(timeout, self.config.timeout)
        ticket = Ticket(len(images), time.monotonic() + wanted, model or self.store.at_hand(name))
        self.queue.enter(name, len(images))
        for row, image in enumerate(images):
            self._decoders.submit(self._prepare, name, image, ticket, row)
        return ticket

    async def finished(self, ticket: Ticket) -> Tensor:
        try:
            async with asyncio.timeout(ticket.deadline - time.monotonic()):
                return await asyncio.wrap_future(ticket.future)
        except LateError:
            raise
        except TimeoutError:
            raise late() from None

    async def model(self, name: str) -> Model:
        """The model of a name; read in a thread, if it has to be."""
        found = self.store.at_hand(name)
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(self._decoders, self.store.get, name)
        return found

    def models(self) -> list[About]:
        """What there is to ask for: the backbone first."""
        return self.catalogue.all()

    def about(self, name: str) -> About:
        """One of them."""
        frozen = name in (FROZEN, self.backbone.name)
        found = self.catalogue.frozen if frozen else self.catalogue.of(name)
        if found is None:
            raise unknown(name)
        return found

    def add(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Put a mask or cascade file on the shelf, if it is sound and of this backbone."""
        checked_name(name)
        self.store.check(data)
        self.shelf.write(name, data, replace=replace)

    def check(self, timeout: float = 5.0) -> None:
        """Run the backbone on one image, before all that waits."""
        self._passed(self._probe(timeout).future.result(timeout))

    async def is_healthy(self, timeout: float = 5.0) -> bool:
        """Whether the backbone runs, and all threads are there. It is tried at most once a second, whoever asks."""
        if not self.workers.complete():
            return False
        if time.monotonic() - self._healthy < _HEALTHY:
            return True
        if self._trying is None or self._trying.future.done():
            self._trying = self._probe(timeout)
        try:
            # Shielded, because others may wait for the same.
            self._passed(await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._trying.future)), timeout))
        except (TimeoutError, SelfmaskError):
            return False
        return True

    def _probe(self, timeout: float) -> Ticket:
        ticket, frozen = Ticket(1, time.monotonic() + timeout), self.store.frozen
        pixels = torch.zeros(3, *frozen.preprocessing.size, dtype=torch.uint8)
        self.queue.first(Job(ticket, 0, frozen, pixels, float("-inf")))
        return ticket

    def _passed(self, vector: Tensor) -> None:
        if not bool(vector.isfinite().all()):
            raise FailedError("the backbone gives no finite vectors")
        self._healthy = time.monotonic()

    # ---- threads ----------------------------------------------------------------------------------------------------

    def _prepare(self, name: str, image: Picture, ticket: Ticket, row: int) -> None:
        """Decode one image, as its model wants it, and line it up."""
        if ticket.over:
            self.queue.lost(name)
            return
        try:
            if ticket.deadline <= time.monotonic():
                raise late()
            model = ticket.model(lambda: self.store.get(name))
            pixels = fit(self._decoded(image, max(model.preprocessing.size)), model.preprocessing)
        except SelfmaskError as error:
            self.queue.lost(name)
            ticket.failed(error)
            return
        except BaseException as error:
            _log.exception("an image could not be prepared")
            self.queue.lost(name)
            ticket.failed(FailedError("the server failed", found=type(error).__name__))
            return
        self.queue.put(name, Job(ticket, row, model, pixels, time.monotonic()))

    def _decoded(self, image: Picture, near: int) -> Tensor:
        if isinstance(image, Tensor):
            return image
        if isinstance(image, Image.Image):
            return to_rgb(image)
        return decode_image(image, near=near, max_pixels=self.config.pixels)

    # ---- starting and stopping --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads, and load what is pinned."""
        self.workers.start()
        self.check(timeout=60.0)
        blank = torch.zeros(3, *self.store.frozen.preprocessing.size, dtype=torch.uint8)
        for name in self.config.pin:
            self.store.pin(name)
            self.embed(name, [blank])
        self.ready = True

    def stop(self) -> None:
        """Refuse what is new, finish what is there, and end the threads."""
        self.ready = False
        self.queue.stop()
        self.workers.stop()
        self._decoders.shutdown()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
