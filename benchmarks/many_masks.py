"""Many different masks on a ResNet, each with statistics of its own: what a server of many tenants holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from selfmask.backbones import Backbone, load_backbone
from selfmask.files import write_atomically
from selfmask.maskfile import PackedMask, codecs, mask_file_bytes, pack_bits
from selfmask.masking import get_masked_model
from selfmask.masking.norms import norm_buffers, saved_statistics

FEW, MANY = 0.03, 0.08
"""Shares of weights that are off: as `fast` leaves them (1 to 4 %: docs/logs/curve.jsonl); and 92 % active."""


def backbone(name: str, size: int) -> Backbone:
    """Random weights: what they are does not matter to how long they take."""
    found = load_backbone(name, pretrained=False)
    return dataclasses.replace(found, preprocessing=dataclasses.replace(found.preprocessing, size=(size, size)))


def save_weights(of: Backbone, file: Path) -> None:
    save_file({name: value.contiguous() for name, value in of.model.state_dict().items()}, file)


def template(of: Backbone) -> PackedMask:
    """A mask with all weights on."""
    masked = get_masked_model(of.model)
    masked.preprocessing = of.preprocessing
    return masked.eval().pack()


def packed(like: PackedMask, seed: int, off: float) -> PackedMask:
    """A mask like another, with its own weights off, and statistics near those of the other."""
    random = np.random.default_rng(seed)
    bits = {}
    for name, size in like.sizes.items():
        flags = np.ones(size, bool)
        flags[random.integers(0, size, round(off * size))] = False
        bits[name] = pack_bits(torch.from_numpy(flags))
    norm = {
        name: value * torch.from_numpy(random.uniform(0.9, 1.1, tuple(value.shape)).astype(np.float32)) + 0.01
        for name, value in like.norm.items()
    }
    return dataclasses.replace(like, bits=bits, norm=norm)


def write(folder: Path, of: Backbone, count: int) -> list[str]:
    """So many mask files, every other one with few weights off; those that are there already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"tenant-{number:04d}" for number in range(count)]
    if all((folder / f"{name}.smn").exists() for name in names):
        return names
    like = template(of)
    own = saved_statistics(norm_buffers(of.model))
    # lzma would be tried on every mask, and lose, and so would classes of weights, which random masks do not have (so
    # no weights are given): that takes most of the time.
    with mock.patch.object(codecs, "compressed", bytes):
        for number, name in enumerate(names):
            if not (file := folder / f"{name}.smn").exists():
                mask = packed(like, number, (FEW, MANY)[number % 2])
                write_atomically(file, mask_file_bytes(mask, {}, own))
    return names


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a folder of masks holds, and how large things are: a model, and of each mask bits and statistics."""

    names: list[str]
    model_bytes: int
    bit_bytes: int
    statistics_bytes: int


def prepared(folder: Path, name: str, count: int) -> Facts:
    """Weights and masks of a backbone, in a folder; what is there already is kept."""
    torch.manual_seed(0)
    of = backbone(name, 224)
    if not (weights := folder / "weights.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(of, weights)
    of.model.load_state_dict(load_file(weights))
    names = write(folder / "masks", of, count)
    parameters = list(of.model.parameters())
    return Facts(
        names,
        model_bytes=sum(each.nbytes for each in parameters),
        bit_bytes=-(-sum(each.numel() for each in parameters) // 8),
        statistics_bytes=sum(value.nbytes for value in saved_statistics(norm_buffers(of.model)).values()),
    )
