"""What one writes in an afternoon: a dense timm model behind FastAPI, one image a forward pass. For comparison."""

from __future__ import annotations

import base64
import io
import os
from typing import Annotated, Any

import timm
import torch
import uvicorn
from fastapi import Body, FastAPI
from PIL import Image
from safetensors.torch import load_file


def app(name: str, weights: str, size: int) -> FastAPI:
    model = timm.create_model(name, num_classes=0)
    model.load_state_dict(load_file(weights))
    model.eval().to(memory_format=torch.channels_last)
    transform = timm.data.create_transform((3, size, size), crop_pct=1.0)
    plain = FastAPI()

    @plain.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @plain.post("/v1/embeddings")
    def embeddings(input: Annotated[str, Body()], model_name: Annotated[str, Body(alias="model")]) -> dict[str, Any]:
        image = Image.open(io.BytesIO(base64.b64decode(input.partition(",")[2]))).convert("RGB")
        with torch.inference_mode():
            vector = model(transform(image)[None].contiguous(memory_format=torch.channels_last))[0]
        return {"data": [{"embedding": base64.b64encode(vector.numpy().tobytes()).decode(), "index": 0}]}

    return plain


if __name__ == "__main__":
    torch.set_num_threads(1)
    served = app(os.environ["PLAIN_MODEL"], os.environ["PLAIN_WEIGHTS"], int(os.environ["PLAIN_SIZE"]))
    uvicorn.run(served, port=int(os.environ["PLAIN_PORT"]), log_level="warning")
