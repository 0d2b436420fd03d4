"""Requests: what clients send, as JSON or as a form, made into images and settings."""

from __future__ import annotations

import binascii
import dataclasses
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from ..errors import BadRequestError

_MAX_FIELDS = 16
Power = Annotated[float, Field(ge=0, le=1)]


class AskedFor(BaseModel):
    """What all requests about images have in common; what else clients send is passed over."""

    model_config = ConfigDict(extra="ignore")

    model: str = Field(description="The name of a mask or cascade; `frozen` is the backbone itself.", max_length=300)
    input: str | list[str] = Field(description="Images as data URIs: `data:image/png;base64,...`. No URL is fetched.")
    timeout: float | None = Field(None, gt=0, description="Seconds until the answer is of no use.")


class EmbeddingsRequest(AskedFor):
    """The body of /v1/embeddings, as OpenAI's clients send it."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, description="Only the length that vectors have.")
    whiten: Literal["auto"] | Power | None = Field(
        None, description="Send the vectors through the map that the run left: `auto`, or a power from 0 to 1."
    )


class ClassifyRequest(AskedFor):
    """The body of /v1/classify."""

    top: int = Field(5, ge=1, le=1000, description="How many classes of each image.")


@dataclasses.dataclass(frozen=True)
class Pictures:
    """A request, with the bytes of its images."""

    asked: Any
    images: list[bytes]


def body_schema(kind: type[AskedFor]) -> dict[str, Any]:
    """For the OpenAPI document: the request as JSON, and as a form."""
    schema = kind.model_json_schema()
    fields = {name: value for name, value in schema["properties"].items() if name != "input"}
    file = {"type": "array", "items": {"type": "string", "format": "binary"}, "description": "Image files."}
    form = {"type": "object", "properties": {**fields, "file": file}, "required": ["model", "file"]}
    content = {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}


async def read(request: Request, kind: type[AskedFor], most: int, max_part: int) -> Pictures:
    """The request, in whichever form. most: images."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type == "multipart/form-data":
        try:
            # Parts are limited by the whole, which is limited where it is received.
            async with request.form(max_files=most, max_fields=_MAX_FIELDS, max_part_size=max_part) as form:
                return await _of_form(form, kind)
        except HTTPException as error:
            raise BadRequestError("the form cannot be read", found=str(error.detail)[:200]) from error
    if content_type != "application/json":
        raise BadRequestError(
            "the request is of an unknown type",
            expected="application/json or multipart/form-data",
            found=content_type[:100],
        )
    return of_json(await request.body(), kind, most)


def of_json(body: bytes, kind: type[AskedFor], most: int) -> Pictures:
    asked = _checked(lambda: kind.model_validate_json(body))
    uris = [asked.input] if isinstance(asked.input, str) else asked.input
    if len(uris) > most:
        raise BadRequestError("there are too many images in the request", expected=f"at most {most}", found=len(uris))
    return Pictures(asked, [_of_uri(uri) for uri in uris])


async def _of_form(form: FormData, kind: type[AskedFor]) -> Pictures:
    fields: dict[str, Any] = {"input": []}
    images = []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            images.append(await value.read())
        elif name != "input":
            fields[name] = value
    return Pictures(_checked(lambda: kind.model_validate(fields)), images)


def _checked(make: Any) -> Any:
    try:
        return make()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise BadRequestError("the request is not valid", found=f"{where[:100]}: {first['msg'][:200]}") from error


def _of_uri(uri: str) -> bytes:
    head, comma, data = uri.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise BadRequestError("an image is not a data URI", expected="data:image/...;base64,...", found=f"{uri[:40]!r}")
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequestError("an image is not in base64", found=str(error)[:100]) from error
