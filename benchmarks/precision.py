"""`python -m benchmarks.precision`: a masked training step in bfloat16 against one in float32, on this CPU.

What `--precision auto` decides by: whether the CPU multiplies bfloat16, and whether the network has grouped
convolutions and does not consist mostly of linear layers. Weights do not matter for speed.
"""

from __future__ import annotations

import sys

import timm
import torch
from rich.console import Console

from selfmask import MaskConfig, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.memory import keep_memory
from selfmask.training.precision import autocast, chosen

from .common import Row, as_table, timed

NETWORKS = {
    "selfmask/tiny": (32, 64),
    "resnet18": (64, 64),
    "resnet50": (64, 32),
    "vit_tiny_patch16_224": (224, 8),
    "tf_efficientnet_lite0": (64, 64),
    "convnext_atto": (64, 32),
    "tiny_vit_5m_224": (64, 64),
}
ROUNDS = 5
CPU = torch.device("cpu")


def row(name: str, size: int, batch: int) -> Row:
    torch.manual_seed(0)
    own = name.startswith("selfmask/")
    model = load_backbone(name).model if own else timm.create_model(name, num_classes=0)
    masked = get_masked_model(model, MaskConfig(select="late")).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)

    def step(low: bool) -> None:
        with autocast("bfloat16" if low else "float32", CPU):
            vectors = masked(images)
        vectors.float().square().mean().backward()
        masked.zero_grad()

    low = chosen("auto", masked, CPU) == "bfloat16"  # then it must not be slower than what `auto` leaves
    what = f"{name}, {size} px: bfloat16 / float32 ({'bfloat16' if low else 'float32'} by auto)"
    return timed(what, lambda: step(True), lambda: step(False), 1.0 if low else None, ROUNDS)


def main() -> int:
    keep_memory()
    rows = [row(name, *shape) for name, shape in NETWORKS.items()]
    Console(width=150).print(as_table(rows))
    return 0 if all(each.holds for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
