"""Answers: vectors and errors in the form that OpenAI's clients read."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import Response
from pydantic_core import to_json
from torch import Tensor

from ..errors import (
    BadImageError,
    BadRequestError,
    BusyError,
    CollectionError,
    LateError,
    MaskFileError,
    MaskWriteError,
    NotAllowedError,
    SelfmaskError,
    SlowRequestError,
    StoppingError,
    TakenNameError,
    TooLargeError,
    UnknownItemError,
    UnknownModelError,
    UnusableModelError,
)
from ..shelf import About

STATUS: dict[type[SelfmaskError], int] = {
    BadRequestError: 400,
    BadImageError: 400,
    NotAllowedError: 401,
    UnknownModelError: 404,
    UnknownItemError: 404,
    CollectionError: 422,
    SlowRequestError: 408,
    TakenNameError: 409,
    UnusableModelError: 409,
    TooLargeError: 413,
    MaskWriteError: 507,
    MaskFileError: 422,
    BusyError: 429,
    StoppingError: 503,
    LateError: 504,
}
"""The first that fits counts."""
_CLOSING = (408, 413)  # the rest of such a request is not waited for


class Json(Response):
    """An answer in JSON, written by pydantic: floats come out as short as possible, and many times faster."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def as_response(error: SelfmaskError, *, browser: bool = False) -> Json:
    """An error as clients expect it. browser: whether one asks, which then asks its user for the key."""
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 500)
    parts = [error.what]
    parts += [f"expected: {error.expected}"] if error.expected is not None else []
    parts += [f"found: {error.found}"] if error.found is not None else []
    parts += [error.todo] if error.todo is not None else []
    headers = {}
    if isinstance(error, BusyError):
        headers["retry-after"] = str(math.ceil(error.after))
    if status == 401:
        headers["www-authenticate"] = 'Basic realm="selfmask"' if browser else "Bearer"
    if status in _CLOSING:
        headers["connection"] = "close"
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = type(error).__name__.removesuffix("Error")
    return Json({"error": {"message": "; ".join(parts), "type": kind, "code": code, "param": None}}, status, headers)


def embeddings(model: str, vectors: Tensor, encoding: str, ran: dict[str, str]) -> Json:
    """The answer to /v1/embeddings. ran: headers, see `ran`."""
    rows = vectors.numpy()
    data = [
        {"object": "embedding", "index": index, "embedding": _coded(row) if encoding == "base64" else row.tolist()}
        for index, row in enumerate(rows)
    ]
    content = {"object": "list", "data": data, "model": model, "usage": _usage(len(rows))}
    return Json(content, headers=ran)


def classes(model: str, names: Sequence[str], probabilities: Tensor, top: int, ran: dict[str, str]) -> Json:
    """The answer to /v1/classify: the likeliest classes of each image, likeliest first."""
    found = probabilities.topk(min(top, len(names)), dim=1)
    data = [
        {
            "object": "classification",
            "index": index,
            "classes": [
                {"label": names[number], "probability": value} for number, value in zip(numbers, values, strict=True)
            ],
        }
        for index, (numbers, values) in enumerate(zip(found.indices.tolist(), found.values.tolist(), strict=True))
    ]
    content = {"object": "list", "data": data, "model": model, "usage": _usage(len(probabilities))}
    return Json(content, headers=ran)


def model(about: About) -> dict[str, Any]:
    """An entry of /v1/models."""
    fields = {
        "kind": about.kind,
        "bytes": about.bytes,
        "base": about.base,
        "active": about.active,
        "head": about.head,
        "map": about.map,
        "kept": about.kept,
        "quality_before": about.quality_before,
        "quality_after": about.quality_after,
        "notes": about.notes,
        "problem": about.problem,
    }
    known = {name: value for name, value in fields.items() if value is not None}
    return {"id": about.name, "object": "model", "created": about.changed, "owned_by": "selfmask", **known}


def _coded(row: np.ndarray[Any, np.dtype[np.float32]]) -> str:
    return base64.b64encode(row.astype("<f4", copy=False).tobytes()).decode()


def _usage(images: int) -> dict[str, int]:
    """Clients want to count tokens; an image is one."""
    return {"prompt_tokens": images, "total_tokens": images}


def ran(batches: Sequence[int], masks: Sequence[int]) -> dict[str, str]:
    """Headers that say, for each image, how many images and how many masks were in its forward pass."""
    return {"x-selfmask-batch": ",".join(map(str, batches)), "x-selfmask-masks": ",".join(map(str, masks))}
