"""The routes of the page, and of searching: everything that needs a collection."""

from __future__ import annotations

import asyncio
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from ...errors import BadRequestError, SelfmaskError, UnknownItemError
from ...evaluation.feature_map import MadeFor
from ..answers import Json
from ..collection import MAX_NEIGHBOURS, Collection, Neighbours, Space
from ..engine import Engine
from ..models import Model
from ..requests import AskedFor, of_json
from ..shelf import FROZEN

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Whatever a name in a collection may try: no script runs but ours, and nothing is loaded from elsewhere."""


class SearchRequest(AskedFor):
    """The body of /v1/search."""

    input: str | list[str] = Field(default_factory=list, description="One image as a data URI.")
    item: int | None = Field(None, ge=0, description="In place of an image: the number of one in the collection.")
    k: int = Field(10, ge=1, le=MAX_NEIGHBOURS, description="How many nearest images.")


def router(engine: Engine, collection: Collection | None) -> APIRouter:
    """The page, and what it asks. Without a collection there is nothing to search, and the page lists the masks."""
    routes = APIRouter()
    static = {name: files(__package__).joinpath("static", name).read_bytes() for name in _TYPES}
    searching = Searching(engine, collection)

    def file(name: str) -> Response:
        return Response(static[name], headers=HEADERS, media_type=_TYPES[name])

    routes.add_api_route("/", partial(file, "index.html"), include_in_schema=False)
    for name in _TYPES:
        if name != "index.html":
            routes.add_api_route(f"/page/{name}", partial(file, name), include_in_schema=False)

    @routes.get("/v1/collection")
    async def about() -> Response:
        """The collection that can be searched, and which models it was indexed with."""
        return Json(await searching.about())

    @routes.get("/v1/collection/planes/{number}")
    async def plane(number: int) -> Response:
        """Some images as points on a plane, with coordinates from 0 to 1: one plane for each kind of vectors."""
        return Json(searching.plane(number))

    @routes.get("/v1/collection/images/{number}")
    async def image(number: int) -> Response:
        """What is known of an image of the collection."""
        return Json(searching.item(number))

    @routes.get("/v1/collection/thumbnails/{number}")
    def thumbnail(number: int) -> Response:  # in a thread: it reads a file
        """A small JPEG of an image of the collection."""
        return Response(searching.thumbnail(number), headers=_KEPT, media_type="image/jpeg")

    @routes.post("/v1/search", openapi_extra={"requestBody": _body()})
    async def search(request: Request) -> Response:
        """The images of the collection that are nearest to one: by the frozen backbone, and by a mask."""
        return Json(await searching.search(await request.body()))

    return routes


_KEPT = {"cache-control": "private, max-age=86400", "x-content-type-options": "nosniff"}


def _body() -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": SearchRequest.model_json_schema()}}}


class Searching:
    """A collection, searched with the vectors of an engine. Which models fit it is found out by their fingerprints."""

    def __init__(self, engine: Engine, collection: Collection | None) -> None:
        self._engine, self._collection = engine, collection

    @property
    def collection(self) -> Collection:
        if self._collection is None:
            raise UnknownItemError(
                "there is no collection to search", todo="start the server with --index FOLDER (selfmask index)"
            )
        return self._collection

    async def about(self) -> dict[str, Any]:
        if self._collection is None:
            return {"images": 0}
        about = self.collection.about
        spaces = [
            {
                "name": space.name,
                "title": space.about.title,
                "width": space.about.width,
                "power": space.about.power,
                "approximate": space.is_approximate,
                "plane": self.collection.planes[space.name] is not None,
            }
            for space in self.collection.spaces.values()
        ]
        # Others fit, too, if they are the same under another name; to find that out, all would have to be read.
        there = {model.name for model in await asyncio.to_thread(self._engine.models) if model.problem is None}
        likely = [FROZEN, *(name for name in self.collection.spaces if name in there and name != FROZEN)]
        fits = {name: space.name for name in likely if (space := await self._fits(name)) is not None}
        return {
            "object": "collection",
            "title": about.title,
            "images": about.images,
            "classes": about.classes,
            "spaces": spaces,
            "models": fits,
        }

    async def _fitting(self, name: str) -> tuple[Model, Space | None]:
        """A model, and the vectors of the collection that it gives, too; None if it was not indexed with it."""
        model = await self._engine.model(name)
        made = MadeFor(model.fingerprint, model.preprocessing)
        return model, next((space for space in self.collection.spaces.values() if space.about.made_for == made), None)

    async def _fits(self, name: str) -> Space | None:
        try:
            return (await self._fitting(name))[1]
        except SelfmaskError:  # it cannot be used, or has gone
            return None

    def plane(self, number: int) -> dict[str, Any]:
        spaces = list(self.collection.spaces)
        points = self.collection.planes[spaces[number]] if 0 <= number < len(spaces) else None
        if points is None:
            raise UnknownItemError("there is no such plane", found=number)
        low, high = points.amin(0), points.amax(0)
        scaled = (points - low) / (high - low).clamp(min=1e-9)
        numbers = self.collection.sampled
        return {"points": scaled.tolist(), "numbers": numbers, "labels": self.collection.labels(numbers)}

    def item(self, number: int) -> dict[str, Any]:
        collection = self.collection
        self._check(number)
        return {"number": number, "name": collection.name(number), "label": collection.label(number)}

    def thumbnail(self, number: int) -> bytes:
        self._check(number)
        return self.collection.thumbnails[number]

    def _check(self, number: int) -> None:
        if not 0 <= number < len(self.collection):
            raise UnknownItemError(
                "there is no such image in the collection", expected=f"0 to {len(self.collection) - 1}", found=number
            )

    async def search(self, body: bytes) -> dict[str, Any]:
        pictures = of_json(body, SearchRequest, 1)
        asked: SearchRequest = pictures.asked
        if (asked.item is None) == (not pictures.images):
            raise BadRequestError("one image expected", expected="`input`, a data URI, or `item`, a number")
        if asked.item is not None:
            self._check(asked.item)
        names = dict.fromkeys([FROZEN, FROZEN if asked.model == self._engine.backbone.name else asked.model])
        fitting = {name: await self._fitting(name) for name in names}
        found = {name: (model, space) for name, (model, space) in fitting.items() if space is not None}
        near = await asyncio.gather(
            *(self._near(model, space, pictures.images, asked) for model, space in found.values())
        )
        missing = [name for name in names if name not in found]
        return {
            "object": "search",
            "model": asked.model,
            "neighbours": {name: self.collection.listed(each) for name, each in zip(found, near, strict=True)},
            "spaces": {name: space.name for name, (_, space) in found.items()},
            "note": _not_indexed(missing[-1]) if missing else None,
        }

    async def _near(self, model: Model, space: Space, images: list[bytes], asked: SearchRequest) -> Neighbours:
        if asked.item is not None:
            return await asyncio.to_thread(space.near, asked.item, asked.k)
        ticket = self._engine.submit(model.name, images, timeout=asked.timeout, model=model)
        vectors = await self._engine.finished(ticket)
        return (await asyncio.to_thread(space.search, vectors, asked.k))[0]


def _not_indexed(name: str) -> str:
    return (
        f"The collection has no vectors of {name}: it was not indexed with this model, or with images of another size. "
        "Index the images with it: selfmask index RUN IMAGES --out FOLDER"
    )
