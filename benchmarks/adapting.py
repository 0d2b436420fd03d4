"""`python -m benchmarks.adapting`: whole adaptation steps and embedding, against what one would write by hand."""

from __future__ import annotations

import copy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from rich.console import Console
from sklearn.datasets import load_sample_images
from timm.data import create_transform
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from selfmask import AdaptConfig, get_masked_model
from selfmask.commands.opening import load_embedder
from selfmask.data import ImageStore, open_images
from selfmask.data.views import MultiCrop, ViewsConfig
from selfmask.embedding.features import write_features
from selfmask.embedding.vectors import embed
from selfmask.memory import keep_memory
from selfmask.objectives.swav import SwAV
from selfmask.preprocessing import Preprocessing
from selfmask.training import LoopConfig, ParameterGroup, Processes, Steps, train

from . import keeping
from . import views as view_rows
from .common import BATCH, Row, as_table, own_process, peak_memory, timed
from .views import pil_pipeline

SIZE, ROUNDS, STEPS = 64, 5, 6
HOW = Preprocessing((SIZE, SIZE), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear")
CONFIG = AdaptConfig.preset("reference", size=SIZE)
VIEWS = ViewsConfig(size=SIZE)


def main() -> int:
    console = Console(width=150)
    rows = [*view_rows.rows(), *step_rows("resnet18"), *embed_rows("resnet18"), *embed_rows("resnet50")]
    rows += memory_rows() + keeping.rows()
    console.print(as_table(rows))
    return 0 if all(row.holds for row in rows) else 1


# ---- a whole step ---------------------------------------------------------------------------------------------------


def step_rows(name: str) -> list[Row]:
    ratios, overheads, seconds = [], [], []
    with own_process(our_side, name) as ours, own_process(their_side, name) as theirs:
        for _ in range(ROUNDS):
            (mine, bare), hers = ours(), theirs()  # type: ignore[misc]
            ratios.append(mine / hers)
            overheads.append(mine / bare)
            seconds.append((mine, hers, bare))
    mine, hers, bare = (f"{BATCH / statistics.median(column):.0f} images/s" for column in zip(*seconds, strict=True))
    what = f"{name}, {SIZE} px, batch {BATCH}, 2 + 6 views"
    return [
        Row(f"{what}: adapt step / straightforward step, in time", mine, hers, statistics.median(ratios), 1 / 1.3),
        Row(f"{what}: adapt step / its forward and backward alone", mine, bare, statistics.median(overheads), 1.08),
    ]


def our_side(name: str) -> Callable[[], tuple[float, float]]:
    """Seconds of a step, and of its forward and backward passes alone, in a process like that of our command."""
    keep_memory()
    ours, floor = our_steps(timm.create_model(name, num_classes=0))
    return lambda: (ours(), floor())


def their_side(name: str) -> Callable[[], float]:
    return plain_steps(timm.create_model(name, num_classes=0))


def our_steps(base: nn.Module) -> tuple[Callable[[], float], Callable[[], float]]:
    """Seconds a step of our loop takes; and those of its forward and backward passes alone, on ready views."""
    masked = get_masked_model(base, CONFIG.mask).to(memory_format=torch.channels_last)
    objective, processes = SwAV(base.num_features, CONFIG.objective), Processes()  # type: ignore[arg-type]
    store = ImageStore(open_images("selfmask/fashion"), side=2 * SIZE)
    batches = Steps(store, MultiCrop(VIEWS, HOW), batch_size=BATCH, seed=0, processes=processes)
    groups = [
        ParameterGroup(list(masked.scores.parameters()), CONFIG.lr),
        ParameterGroup(list(objective.parameters()), CONFIG.head_lr, CONFIG.weight_decay),
    ]
    ready = batches[0]

    def run() -> float:
        marks: list[float] = []
        loop, mark = LoopConfig(log_every=1), lambda _: marks.append(time.perf_counter())
        train(masked, objective, groups, batches, STEPS + 1, loop, None, processes, [mark])
        return (marks[-1] - marks[0]) / STEPS

    def bare() -> float:
        masked.train()
        for step in range(STEPS + 1):
            if step == 1:
                start = time.perf_counter()
            masked.zero_grad(), objective.zero_grad()
            objective.loss(masked, ready, 0.0)[0].backward()
        return (time.perf_counter() - start) / STEPS

    return run, bare


class Straightforward(nn.Module):
    """A convolution that masks its own weight on every forward, put in place of the one it had."""

    def __init__(self, old: nn.Conv2d) -> None:
        super().__init__()
        self.old = old.requires_grad_(False)
        self.score = nn.Parameter(torch.ones_like(old.weight))

    def forward(self, x: Tensor) -> Tensor:
        hard = (self.score > 0).float()
        mask = hard + self.score - self.score.detach()  # straight through
        weight = self.old.weight * mask / hard.mean().sqrt()
        return self.old._conv_forward(x, weight, self.old.bias)


class Pictures(Dataset[list[Tensor]]):
    def __init__(self) -> None:
        images = open_images("selfmask/fashion")
        self.images = [Image.fromarray(images[i].permute(1, 2, 0).numpy()) for i in range(2000)]
        self.transforms = [
            pil_pipeline(VIEWS, size, scale)
            for part, size, scale in VIEWS.groups
            for _ in range(part.stop - part.start)
        ]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> list[Tensor]:
        return [transform(self.images[index]) for transform in self.transforms]


def plain_steps(model: nn.Module) -> Callable[[], float]:
    """Seconds of a step as one would write it: PIL views in two worker processes, modules replaced."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d):
                setattr(parent, name, Straightforward(child))
    model.train()
    scores = [parameter for name, parameter in model.named_parameters() if name.endswith("score")]
    heads = SwAV(model.num_features, CONFIG.objective)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(
        [{"params": scores, "lr": CONFIG.lr}, {"params": list(heads.parameters()), "lr": CONFIG.head_lr}],
        momentum=0.9,
    )
    pictures = Pictures()

    def run() -> float:
        # Forked, as is the default here: in a process that was itself spawned, workers would be, too.
        loader = DataLoader(
            pictures, BATCH, shuffle=True, num_workers=2, drop_last=True, multiprocessing_context="fork"
        )
        batches: Iterator[Any] = iter(loader)
        for step in range(STEPS + 1):
            if step == 1:
                start = time.perf_counter()
            heads.before_step(model, 0.0)
            optimizer.zero_grad()
            heads.loss(model, next(batches), 0.0)[0].backward()
            optimizer.step()
        return (time.perf_counter() - start) / STEPS

    return run


# ---- embedding ------------------------------------------------------------------------------------------------------


def embed_rows(name: str, number: int = 192) -> list[Row]:
    """Real photographs in files, 500 x 375; timm's own evaluation transform and a DataLoader on the other side."""
    dense = timm.create_model(name, num_classes=0).eval()
    masked = get_masked_model(copy.deepcopy(dense), CONFIG.mask).eval()
    preprocessing = Preprocessing((224, 224), HOW.mean, HOW.std, "bicubic")
    transform = create_transform((3, 224, 224), mean=HOW.mean, std=HOW.std, interpolation="bicubic", crop_pct=1.0)
    with tempfile.TemporaryDirectory() as folder:
        paths = photographs(Path(folder), number)
        images = open_images(folder)

        class Files(Dataset[Tensor]):
            def __len__(self) -> int:
                return len(paths)

            def __getitem__(self, index: int) -> Tensor:
                view: Tensor = transform(Image.open(paths[index]).convert("RGB"))
                return view

        def ours() -> None:
            embed(masked, images, preprocessing, batch_size=BATCH)

        @torch.inference_mode()
        def other() -> None:
            for batch in DataLoader(Files(), BATCH, num_workers=2):
                dense(batch)

        label = f"{name}: embed {number} JPEG files with a mask / timm loop on the dense base, in time"
        return [timed(label, ours, other, 1 / 0.95, repeats=5)]


class Many(Dataset[Tensor]):
    """The bundled pictures, over and over."""

    def __init__(self, number: int) -> None:
        self.images, self.number = open_images("selfmask/fashion"), number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index % len(self.images)]


def memory_rows() -> list[Row]:
    """Peak memory of `embed` must not grow with the number of images; each in a process of its own."""
    numbers = 100_000, 10_000
    peaks = [
        int(
            subprocess.run(
                [sys.executable, "-m", "benchmarks.adapting", str(n)], capture_output=True, check=True
            ).stdout
        )
        for n in numbers
    ]
    label = "selfmask/tiny: peak memory of embedding {:,} / {:,} images".format(*numbers)
    return [Row(label, *(f"{peak / 2**20:.0f} MB" for peak in peaks), peaks[0] / peaks[1], 1.1)]


def embed_many(number: int) -> int:
    keep_memory()  # as the command does
    with tempfile.TemporaryDirectory() as folder:
        write_features(
            Path(folder) / "x.npz", load_embedder("selfmask/tiny"), open_images(Many(number)), batch_size=256
        )
    return peak_memory()


def photographs(folder: Path, number: int) -> list[Path]:
    both = [Image.fromarray(image) for image in load_sample_images().images]
    paths = []
    for index in range(number):
        left, top = index % 140, index % 50
        paths.append(folder / f"{index:04}.jpg")
        both[index % 2].crop((left, top, left + 500, top + 375)).save(paths[-1], quality=90)
    return paths


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(embed_many(int(sys.argv[1])))
    else:
        sys.exit(main())
