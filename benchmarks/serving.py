"""Using a mask: forward passes, loading from disk and switching, against the plain base and a full checkpoint."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from rich.console import Console
from torch import nn

from selfmask import MaskedModel

from .common import BATCH, SIZE, Row, as_table, learn_mask, own_process, timed


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
    """`masks` are two learned ResNet-50 masks on `base`. Each side is a process of its own, as a server would be."""
    label, rows = f"resnet50, {1 - masks[0].sparsity()['total']:.1%} off", []
    with tempfile.TemporaryDirectory() as folder, own_process(checkpoint_loader, folder) as other:
        torch.save(base.state_dict(), f"{folder}/full.pt")
        for i, mask in enumerate(masks):
            mask.save_pretrained(f"{folder}/{i}.smn")
        for what, maker, limit, repeats in (
            ("decode and apply a mask", mask_loader, 1.0, 51),
            ("switch masks in memory", mask_switcher, 0.25, 51),
            ("first mask on a base (hashes it)", first_mask_loader, None, 9),
        ):
            with own_process(maker, folder) as ours:
                rows.append(timed(f"{label}: {what} / load a checkpoint", ours, other, limit, repeats))
    return rows


def checkpoint_loader(folder: str) -> Callable[[], object]:
    dense = timm.create_model("resnet50", num_classes=0)
    return lambda: dense.load_state_dict(torch.load(f"{folder}/full.pt", weights_only=True))


def mask_loader(folder: str) -> Callable[[], object]:
    masked = MaskedModel.from_pretrained(_base(folder), f"{folder}/0.smn")
    turn = 0

    def load() -> None:
        nonlocal turn
        turn += 1
        masked.load_mask(f"{folder}/{turn % 2}.smn", f"mask {turn}")
        masked.set_mask(f"mask {turn}")
        if turn > 1:
            masked.delete_mask(f"mask {turn - 1}")

    return load


def mask_switcher(folder: str) -> Callable[[], object]:
    masked = MaskedModel.from_pretrained(_base(folder), f"{folder}/0.smn")
    masked.load_mask(f"{folder}/1.smn", "other")
    return lambda: masked.set_mask("default" if masked.active_mask == "other" else "other")


def first_mask_loader(folder: str) -> Callable[[], object]:
    base = _base(folder)
    return lambda: MaskedModel.from_pretrained(base, f"{folder}/0.smn")


def _base(folder: str) -> nn.Module:
    base = timm.create_model("resnet50", num_classes=0)
    base.load_state_dict(torch.load(f"{folder}/full.pt", weights_only=True))
    return base


if __name__ == "__main__":  # the loading rows alone
    resnet50 = timm.create_model("resnet50", num_classes=0, zero_init_last=False)
    learned = [learn_mask(resnet50, lr=1.0, steps=steps, select="paper-resnet") for steps in (100, 90)]
    Console(width=150).print(as_table(loading_rows(resnet50, learned)))
