"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)


class _Queue(Protocol):
    @property
    def inside(self) -> int: ...
    @property
    def waiting(self) -> int: ...


class _Store(Protocol):
    nbytes: int


class Metrics:
    """Of one server. Masks are no labels: there may be thousands, and their names are the tenants'."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        self._requests = Counter(
            "selfmask_requests", "Requests, by route and status.", ["route", "status"], registry=own
        )
        self._latency = Histogram(
            "selfmask_request_seconds", "From the first byte of a request to the last of its answer.", ["route"],
            buckets=_SECONDS, registry=own,
        )  # fmt: skip
        self._batch = Histogram("selfmask_batch_images", "Images in a forward pass.", buckets=_IMAGES, registry=own)
        self._masks = Histogram("selfmask_batch_masks", "Masks in a forward pass.", buckets=_IMAGES, registry=own)
        self._forward = Histogram(
            "selfmask_forward_seconds", "Of a batch, switching included.", buckets=_SECONDS, registry=own
        )
        cache = Counter("selfmask_cache", "Look-ups of masks.", ["tier", "outcome"], registry=own)
        self._hot = cache.labels("expanded", "hit")
        self._cold = cache.labels("expanded", "miss")
        self._tier = {what: cache.labels("packed", what) for what in ("hit", "miss")}
        self._switches = Counter("selfmask_switches", "Masks put in place of another.", registry=own)
        self._replaced = Counter("selfmask_workers_replaced", "Threads that run the model and had ended.", registry=own)

    def watch(self, queue: _Queue, store: _Store) -> None:
        """Values that are asked for when they are shown."""
        inside = Gauge("selfmask_images_inside", "Images accepted and not yet answered.", registry=self._registry)
        inside.set_function(lambda: queue.inside)
        waiting = Gauge("selfmask_queue_images", "Images that wait for the model.", registry=self._registry)
        waiting.set_function(lambda: queue.waiting)
        packed = Gauge("selfmask_packed_bytes", "Memory of packed masks.", registry=self._registry)
        packed.set_function(lambda: store.nbytes)

    def watch_workers(self, alive: Callable[[], int]) -> None:
        workers = Gauge("selfmask_workers", "Threads that run the model.", registry=self._registry)
        workers.set_function(alive)

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def ran(self, images: int, masks: int, seconds: float) -> None:
        self._batch.observe(images)
        self._masks.observe(masks)
        self._forward.observe(seconds)

    def replaced(self) -> None:
        self._replaced.inc()

    def packed(self, outcome: str) -> None:
        self._tier[outcome].inc()

    def expanded(self, outcome: str) -> None:
        if outcome == "hit":
            self._hot.inc()
        else:
            self._cold.inc()
            self._switches.inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
