"""Servers for tests: the bundled backbone, masks that differ, bundled pictures, and a real socket."""

from __future__ import annotations

import base64
import io
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import torch
from PIL import Image
from torch import Tensor

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.backbones import Backbone, load_backbone
from selfmask.data import open_images
from selfmask.data.images import decode_image
from selfmask.embedding.vectors import embed
from selfmask.objectives.heads import LinearHead
from selfmask.serving.app import create_app
from selfmask.serving.collection import Collection
from selfmask.serving.config import ServeConfig
from selfmask.serving.engine import Engine
from selfmask.serving.server import server_of

BACKBONE = "selfmask/tiny"
PATIENT = {"max_wait_ms": 5000.0}
"""All images of a request then share a forward pass, on however busy a machine: vectors are the same to the bit."""
KEY, ADMIN = "k" * 32, "a" * 32


def many(count: int) -> int:
    """A fifth of so many, in which faults show as well; with SELFMASK_TEST_MANY=1 all, which takes minutes."""
    return count if os.environ.get("SELFMASK_TEST_MANY") else count // 5


def backbone() -> Backbone:
    return load_backbone(BACKBONE)


@cache
def photo(number: int, side: int = 28) -> bytes:
    """A bundled picture, as a file."""
    pixels = open_images("selfmask/fashion")[number].permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).resize((side, side)).save(file, "PNG")
    return file.getvalue()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def save_mask(path: Path, seed: int, off: float = 0.05, classes: Sequence[str] = ()) -> Path:
    """A mask of its own, with statistics of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(mask_bytes(seed, off, tuple(classes)))
    return path


@cache
def mask_bytes(seed: int, off: float, classes: tuple[str, ...] = ()) -> bytes:
    masked = get_masked_model(backbone().model, MaskConfig())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for score in masked.scores.parameters():
            score.fill_(1).masked_fill_(torch.rand(score.shape, generator=generator) < off, -1)
        masked.train()(torch.randn(8, 3, 32, 32, generator=generator))
    head = LinearHead(256, classes, seed=seed).tensors() if classes else None
    return masked.eval().mask_bytes(head=head)


def save_masks(folder: Path, count: int) -> list[str]:
    """As many different masks, few weights off and many, by name."""
    for number in range(count):
        save_mask(folder / f"m{number}.smn", seed=number, off=(0.002, 0.08, 0.4)[number % 3])
    return [f"m{number}" for number in range(count)]


class Files:
    """Files of images, in memory."""

    def __init__(self, files: Sequence[bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return decode_image(self.files[index], near=32)


def offline(mask: Path | None, files: Sequence[bytes], batch_size: int = 64) -> Tensor:
    """What `selfmask embed` gives, without a server."""
    return _offline(None if mask is None else mask.read_bytes(), tuple(files), batch_size)


@cache
def _offline(mask: bytes | None, files: tuple[bytes, ...], batch_size: int) -> Tensor:
    own = backbone()
    model = own.model if mask is None else MaskedModel.from_pretrained(own.model, mask)
    return embed(model.eval(), Files(files), own.preprocessing, batch_size=batch_size)[0]


@contextmanager
def served(
    folder: Path, collection: Collection | None = None, **settings: Any
) -> Iterator[tuple[httpx2.Client, Engine]]:
    """A server on a free port of this machine, in a thread, and a client of it."""
    config = ServeConfig(**{"port": 0, "workers": 2, **PATIENT, **settings})
    engine = Engine(backbone(), folder, config)
    server = server_of(create_app(engine, collection), config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), 60)
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client, engine
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until this holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def vectors_of(answer: httpx2.Response) -> Tensor:
    assert answer.status_code == 200, answer.text
    return torch.tensor([each["embedding"] for each in answer.json()["data"]])


def ask(client: httpx2.Client, model: str, *images: bytes, **more: Any) -> httpx2.Response:
    return client.post("/v1/embeddings", json={"model": model, "input": [uri(each) for each in images], **more})


def address_of(client: httpx2.Client) -> tuple[str, int]:
    return client.base_url.host, client.base_url.port or 80


def raw(client: httpx2.Client, data: bytes, wait: float = 5.0) -> bytes:
    """What the server answers to these bytes."""
    with socket.create_connection(address_of(client), timeout=wait) as connection:
        answer = b""
        try:
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        except (TimeoutError, ConnectionError):
            pass
        return answer


def request_head(length: int | None, path: str = "/v1/embeddings") -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{size}\r\n\r\n".encode()


class hold:  # noqa: N801
    """Within, the workers of an engine wait before they run the backbone."""

    def __init__(self, engine: Engine) -> None:
        self.frozen, self.go = engine.store.frozen, threading.Event()

    def __enter__(self) -> None:
        real = type(self.frozen).vectors

        def waiting(images: Tensor) -> Tensor:
            assert self.go.wait(30)
            return real(self.frozen, images)

        self.frozen.vectors = waiting  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self.frozen.vectors
        self.go.set()
