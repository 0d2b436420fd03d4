"""Using a mask: forward passes, loading from disk and switching, against the plain base and a full checkpoint."""

from __future__ import annotations

import copy
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import timm
import torch
from rich.console import Console
from torch import nn

from selfmask import MaskedModel

from .common import BATCH, SIZE, Row, as_table, learn_mask, timed


def forward_rows(name: str) -> list[Row]:
    base = timm.create_model(name, num_classes=0).eval()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mask.smn"
        learn_mask(base, lr=2000, steps=2, select="paper-resnet").save_pretrained(file)
        masked = MaskedModel.from_pretrained(copy.deepcopy(base), file).eval()
    images = torch.randn(BATCH, 3, SIZE, SIZE)
    with torch.inference_mode():
        label = f"{name}: forward with a loaded mask / plain base"
        return [timed(label, lambda: masked(images), lambda: base(images), 1.02, repeats=51)]


def loading_rows(base: nn.Module, masks: list[MaskedModel]) -> list[Row]:
    """`masks` are two learned ResNet-50 masks on `base`.

    Measured in a process of its own, as a server is: one that has trained holds memory to load checkpoints into.
    """
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        torch.save(base.state_dict(), f"{folder}/full.pt")
        for i, mask in enumerate(masks):
            mask.save_pretrained(f"{folder}/{i}.smn")
        share = 1 - masks[0].sparsity()["total"]
        return pool.submit(_loading_rows, Path(folder), f"resnet50, {share:.1%} off").result()


def _loading_rows(folder: Path, label: str) -> list[Row]:
    checkpoint, files = folder / "full.pt", [folder / f"{i}.smn" for i in range(2)]
    base = timm.create_model("resnet50", num_classes=0)
    base.load_state_dict(torch.load(checkpoint, weights_only=True))
    dense = copy.deepcopy(base)
    masked = MaskedModel.from_pretrained(base, files[0])
    masked.load_mask(files[1], "other")
    turn = 0

    def load_checkpoint() -> None:
        dense.load_state_dict(torch.load(checkpoint, weights_only=True))

    def load_mask() -> None:
        nonlocal turn
        turn += 1
        masked.load_mask(files[turn % 2], f"mask {turn}")
        masked.set_mask(f"mask {turn}")
        if turn > 1:
            masked.delete_mask(f"mask {turn - 1}")

    def load_first_mask() -> None:
        MaskedModel.from_pretrained(base, files[0])

    def switch() -> None:
        masked.set_mask("default" if masked.active_mask == "other" else "other")

    return [
        timed(f"{label}: decode and apply a mask / load a checkpoint", load_mask, load_checkpoint, 1.0, repeats=51),
        timed(f"{label}: switch masks in memory / load a checkpoint", switch, load_checkpoint, 0.25, repeats=51),
        timed(
            f"{label}: first mask on a base (hashes it) / load a checkpoint", load_first_mask, load_checkpoint, None, 9
        ),
    ]


if __name__ == "__main__":  # the loading rows alone
    resnet50 = timm.create_model("resnet50", num_classes=0, zero_init_last=False)
    learned = [learn_mask(resnet50, lr=1.0, steps=steps, select="paper-resnet") for steps in (100, 90)]
    Console(width=150).print(as_table(loading_rows(resnet50, learned)))
