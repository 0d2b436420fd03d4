"""`selfmask demo`: learn a mask, save it, load it, and count the bytes."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ..masking import MaskConfig, MaskedModel, get_masked_model

_STEPS, _BATCH, _TRAIN = 200, 64, 1200


class TinyNet(nn.Module):
    """A small convolutional network for 8 x 8 digits. Its weights are random and stay so: only the mask learns."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.Conv2d(64, 128, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(128), nn.ReLU()),
            *(nn.Conv2d(128, 256, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(256), nn.ReLU()),
        )
        self.output = nn.Linear(256, 10, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.output(self.features(images).mean((2, 3)))
        return logits


def demo(
    out: Annotated[Path, typer.Option(help="Where to put the mask.")] = Path("runs/demo/mask.smn"),
    seed: Annotated[int, typer.Option(help="Of the random weights and the order of the images.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Also draw what is printed, as an SVG file.")] = None,
) -> None:
    """Teach a random network to read digits by switching weights off, and keep the result as a tiny file.

    Takes some seconds and needs nothing but what is installed.
    """
    console = Console() if picture is None else Console(record=True, width=80)
    torch.manual_seed(seed)
    data = load_digits()
    images = torch.from_numpy(data.images).float().div(8).sub(1)[:, None]
    labels = torch.from_numpy(data.target)
    base = TinyNet()
    with torch.no_grad():
        base.output.weight.mul_(4)  # random features differ little; a sharper softmax gives them a gradient
    masked = get_masked_model(base, MaskConfig())
    before = _accuracy(masked.eval(), images[_TRAIN:], labels[_TRAIN:])
    _learn(masked, images[:_TRAIN], labels[:_TRAIN])
    after = _accuracy(masked.eval(), images[_TRAIN:], labels[_TRAIN:])
    written = masked.save_pretrained(out, notes="learned by `selfmask demo` on the digits of scikit-learn")

    loaded = MaskedModel.from_pretrained(copy.deepcopy(base), out).eval()
    with torch.no_grad():
        same = torch.equal(loaded(images), masked(images))
    parameters = sum(p.numel() for p in base.parameters())
    table = Table("", "bytes", title="what one task costs", title_justify="left")
    table.add_row("float32 copy of the network", f"{4 * parameters:,}")
    table.add_row("one bit a weight", f"{-(-masked.num_masked // 8):,}")
    table.add_row("the mask file, statistics included", f"{written:,}")
    console.print(table)
    console.print(f"test accuracy {before:.1%} -> {after:.1%}, with {masked.sparsity()['total']:.1%} of the weights on")
    console.print(f"loaded again from {out}: outputs {'identical' if same else 'DIFFERENT'}")
    if picture is not None:
        # Without the fonts that rich would load from the network.
        svg = console.export_svg(title="selfmask demo")
        picture.write_text(re.sub(r"@font-face {.*?}", "", svg, flags=re.DOTALL))
    console.print(f"look into it:  selfmask inspect {out}", highlight=False)


def _learn(masked: MaskedModel, images: Tensor, labels: Tensor) -> None:
    """The paper's recipe with labels: plain SGD on the scores, momentum 0.9, learning rate 50."""
    masked.train()
    optimizer = torch.optim.SGD(masked.scores.parameters(), lr=50, momentum=0.9)
    for _ in track(range(_STEPS), description="learning which weights to switch off"):
        batch = torch.randint(len(images), (_BATCH,))
        loss = F.cross_entropy(masked(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())
