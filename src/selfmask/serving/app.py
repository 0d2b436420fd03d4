"""The HTTP interface of an engine: FastAPI, with the routes of OpenAI's embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from torch import Tensor

from ..errors import BadRequestError, SelfmaskError
from . import answers, masks, requests
from .answers import Json, as_response
from .collection import Collection
from .engine import Engine
from .gate import Gate
from .keys import keys_of
from .metrics import CONTENT_TYPE
from .models import Model
from .page.routes import router
from .queue import Ticket
from .requests import ClassifyRequest, EmbeddingsRequest, Pictures

_LARGE = 1 << 18  # bytes of a body that is not parsed in the thread that serves everybody
T = TypeVar("T")


def create_app(engine: Engine, collection: Collection | None = None) -> FastAPI:
    """The app of an engine, which it starts and stops; with a collection, it searches that too."""
    config = engine.config
    user, admin = keys_of(config)
    app = FastAPI(
        title="selfmask", version=version("selfmask"), lifespan=partial(_lifespan, engine), redoc_url=None,
        summary="Image embeddings by one backbone under any number of masks.",
    )  # fmt: skip
    _add_routes(app, engine)
    masks.add_routes(app, engine)
    app.include_router(router(engine, collection))
    app.add_exception_handler(SelfmaskError, _failed)
    app.add_exception_handler(HTTPException, _refused)
    app.add_middleware(
        Gate,
        metrics=engine.metrics,
        routes=frozenset(getattr(route, "path", "") for route in app.routes),
        user=user,
        admin=admin,
        max_body=config.body,
        timeout=config.timeout,
        any_host=config.any_host,
    )
    return app


@asynccontextmanager
async def _lifespan(engine: Engine, app: FastAPI) -> AsyncIterator[None]:
    await asyncio.to_thread(engine.start)
    try:
        yield
    finally:
        await asyncio.to_thread(engine.stop)


def _add_routes(app: FastAPI, engine: Engine) -> None:
    config = engine.config

    @app.post("/v1/embeddings", openapi_extra=requests.body_schema(EmbeddingsRequest), summary="Vectors of images")
    async def embeddings(request: Request) -> Response:
        asked, model, vectors, ticket = await _run(request, EmbeddingsRequest)
        if asked.dimensions not in (None, model.width):
            raise BadRequestError("vectors cannot be shortened", expected=model.width, found=asked.dimensions)
        if asked.whiten is not None:
            vectors = await _in_thread(partial(_whitened, model, vectors, asked.whiten))
        ran = answers.ran(ticket.batches, ticket.masks)
        return answers.embeddings(asked.model, vectors, asked.encoding_format, ran)

    @app.post("/v1/classify", openapi_extra=requests.body_schema(ClassifyRequest), summary="Classes of images")
    async def classify(request: Request) -> Response:
        asked, model, vectors, ticket = await _run(request, ClassifyRequest)
        head = model.head
        assert head is not None
        probabilities = await _in_thread(lambda: head(vectors).softmax(1).detach())
        ran = answers.ran(ticket.batches, ticket.masks)
        return answers.classes(asked.model, head.classes, probabilities, asked.top, ran)

    @app.get("/v1/models", summary="What there is to ask for")
    async def models() -> Response:
        found = await asyncio.to_thread(engine.models)
        return Json({"object": "list", "data": [answers.model(each) for each in found]})

    @app.get("/v1/models/{name}", summary="One of them")
    async def one_model(name: str) -> Response:
        return Json(answers.model(await asyncio.to_thread(engine.about, name)))

    @app.get("/health", summary="Whether the backbone runs: a forward pass, at most one a second")
    async def health() -> Response:
        return Json({"status": "ok"}) if await engine.is_healthy() else Json({"status": "failing"}, 503)

    @app.get("/ready", summary="Whether requests are taken: all that is pinned is loaded")
    async def ready() -> Response:
        return Json({"status": "ready"}) if engine.ready else Json({"status": "not ready"}, 503)

    @app.get("/metrics", summary="Counts, for Prometheus")
    async def metrics() -> Response:
        return Response(engine.metrics.text(), media_type=CONTENT_TYPE)

    async def _run(request: Request, kind: type[requests.AskedFor]) -> tuple[Any, Model, Tensor, Ticket]:
        given = await _read(request, kind)
        asked = given.asked
        model = await engine.model(asked.model)
        if kind is ClassifyRequest and model.head is None:
            raise BadRequestError(f"{asked.model} has no head to tell classes with", todo="ask for a mask with one")
        ticket = engine.submit(asked.model, given.images, timeout=asked.timeout, model=model)
        return asked, model, await _unless_gone(request, engine, ticket), ticket

    async def _read(request: Request, kind: type[requests.AskedFor]) -> Pictures:
        if int(request.headers.get("content-length", "0")[:20] or 0) > _LARGE and _is_json(request):
            body = await request.body()
            return await _in_thread(lambda: requests.of_json(body, kind, config.max_images))
        return await requests.read(request, kind, config.max_images, config.body)


def _is_json(request: Request) -> bool:
    return request.headers.get("content-type", "").startswith("application/json")


async def _in_thread(function: Callable[[], T]) -> T:
    return await asyncio.to_thread(function)


def _whitened(model: Model, vectors: Tensor, power: float | str) -> Tensor:
    if model.map is None:
        raise BadRequestError(f"{model.name} has no map to whiten with", todo="leave whiten out")
    return (model.map if isinstance(power, str) else model.map.at(power))(vectors)


async def _unless_gone(request: Request, engine: Engine, ticket: Ticket) -> Tensor:
    """The vectors; if the client goes away before, nothing more is done for it."""
    vectors = asyncio.ensure_future(engine.finished(ticket))
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({vectors, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not vectors.done():
            raise BadRequestError("the client has gone")  # nobody will read it
        return vectors.result()
    finally:
        for task in (vectors, gone):
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, SelfmaskError)
    return as_response(error)


async def _refused(request: Request, error: Exception) -> Response:
    """What the framework refuses: paths and methods that there are not."""
    assert isinstance(error, HTTPException)
    content = {"message": str(error.detail), "type": "invalid_request_error", "code": None, "param": None}
    return Json({"error": content}, error.status_code, dict(error.headers or {}))
