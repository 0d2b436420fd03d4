"""Adding and removing masks while the server runs, for whoever has the admin key."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Query, Request, Response
from starlette.datastructures import UploadFile

from ..errors import BadRequestError
from . import answers
from .answers import Json
from .engine import Engine

_BODY = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}  # fmt: skip  # noqa: E501


def add_routes(app: FastAPI, engine: Engine) -> None:
    @app.post("/v1/masks", status_code=201, openapi_extra=_BODY, summary="Add a mask or cascade: the bytes of its file")
    async def add(request: Request, name: str = Query(), replace: bool = Query(False)) -> Response:
        data = await _file(request, engine.config.body)
        await asyncio.to_thread(engine.add, name, data, replace=replace)
        return Json(answers.model(await asyncio.to_thread(engine.about, name)), 201)

    @app.delete("/v1/masks/{name}", summary="Remove a mask")
    async def remove(name: str) -> Response:
        await asyncio.to_thread(engine.shelf.remove, name)
        return Json({"id": name, "object": "model", "deleted": True})


async def _file(request: Request, most: int) -> bytes:
    """The body itself, or the one file of a form."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        return await request.body()
    async with request.form(max_files=1, max_fields=1, max_part_size=most) as form:
        files = [value for value in form.values() if isinstance(value, UploadFile)]
        if len(files) != 1:
            raise BadRequestError("there is no file in the form", expected="one")
        return await files[0].read()
