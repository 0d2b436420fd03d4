"""Small real images, and a network whose vectors depend on every pixel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from selfmask.backbones import TinyResNet
from selfmask.embedding.embedder import Embedder
from selfmask.preprocessing import Preprocessing

HOW = Preprocessing((32, 32), (0.49, 0.48, 0.45), (0.25, 0.24, 0.26), "bicubic")


def tiny() -> TinyResNet:
    torch.manual_seed(0)
    return TinyResNet().eval()


def embedder() -> Embedder:
    return Embedder("tiny", tiny(), HOW, 256)


def weights_file(folder: Path) -> Path:
    save_file(tiny().state_dict(), folder / "tiny.safetensors")
    return folder / "tiny.safetensors"


def pictures(folder: Path, count: int, *, classes: int = 1, bad: tuple[int, ...] = ()) -> Path:
    """`count` PNG files of several shapes; with classes, each class has its own colour and folder."""
    random = np.random.default_rng(0)
    shapes = [(40, 30), (30, 48), (32, 32), (90, 70), (20, 25)]
    for i in range(count):
        place = folder / f"class{i % classes}" / f"{i:04d}.png" if classes > 1 else folder / f"{i:04d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        height, width = shapes[i % len(shapes)]
        pixels = random.integers(0, 100, (height, width, 3))
        pixels[:, :, i % classes] += 100
        Image.fromarray(pixels.astype(np.uint8)).save(place)
        if i in bad:
            place.write_bytes(place.read_bytes()[:60])
    return folder
