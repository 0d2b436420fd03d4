"""Small real videos whose frames tell their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
from torch import Tensor

FPS, SECONDS = 10, 6
CODECS = {".mp4": "libx264", ".mkv": "libx264", ".webm": "libvpx", ".avi": "mpeg4", ".mov": "mpeg4"}


def write(
    path: Path, *, seconds: float = SECONDS, side: int = 64, key_every: int = 15, codec: str = "", **options: str
) -> Path:
    """Frame k shows k as eight squares, black or white: what survives any codec."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=options) as container:
        stream: Any = container.add_stream(codec or CODECS[path.suffix], rate=FPS)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = side, side, "yuv420p", key_every
        stream.codec_context.max_b_frames = 0 if path.suffix == ".avi" else 2
        for number in range(round(seconds * FPS)):
            frame = av.VideoFrame.from_ndarray(picture(number, side), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def picture(number: int, side: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    pixels = np.random.default_rng(number).integers(0, 60, (side, side, 3), np.uint8)
    for bit in range(8):
        if number >> bit & 1:
            pixels[bit // 4 * side // 2 :, bit % 4 * side // 4 : (bit % 4 + 1) * side // 4][: side // 2] += 190
    return pixels


def shown(image: Tensor) -> int:
    side = image.shape[-1]
    squares = [
        image[:, bit // 4 * side // 2 :, bit % 4 * side // 4 : (bit % 4 + 1) * side // 4][:, : side // 2]
        for bit in range(8)
    ]
    return sum(1 << bit for bit, square in enumerate(squares) if square.float().mean() > 128)
