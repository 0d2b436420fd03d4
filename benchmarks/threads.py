"""`python -m benchmarks.threads`: the throughput of two threads on two masks against that of one thread.

PyTorch is given one core a thread (`torch.set_num_threads(1)`) on both sides: else one thread would use all of them.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from selfmask import MaskedModel

from .common import digits, imagenet_lite0, learn_mask

SIDE, REPEATS, SECONDS = 224, 7, 0.5
Call = Callable[[], object]


def main() -> int:
    torch.set_num_threads(1)
    table = Table("images a call", "arrangement", "images/s", "of one thread", title="Throughput")
    masked = two_masks(imagenet_lite0())
    for batch in (8, 1):
        measured = throughputs(masked, digits(SIDE)[0][:batch].contiguous(memory_format=torch.channels_last))
        one = measured["one thread, a view"]
        for arrangement, found in measured.items():
            ratio = statistics.median(a / b for a, b in zip(found, one, strict=True))
            table.add_row(str(batch), arrangement, f"{statistics.median(found):.1f}", f"{ratio:.2f}")
    console = Console(width=120)
    console.print(f"EfficientNet-Lite0, images of {SIDE} x {SIDE}; {os.cpu_count()} cores; medians of {REPEATS} turns")
    console.print(table)
    console.print(costs(masked))
    return 0


def two_masks(base: nn.Module) -> MaskedModel:
    """A base with two masks of few steps: what a mask holds does not matter to how long it takes."""
    base = base.eval().to(memory_format=torch.channels_last)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            learn_mask(base, lr=20, steps=1 + number).save_pretrained(Path(folder) / f"{number}.smn")
        masked = MaskedModel.from_pretrained(copy.deepcopy(base), Path(folder) / "0.smn", name="0")
        masked.load_mask(Path(folder) / "1.smn", "1")
    return masked.eval()


def throughputs(masked: MaskedModel, images: Tensor) -> dict[str, list[float]]:
    """Images a second in every arrangement, one after the other in each turn: the speed of a machine drifts."""
    views = [masked.view("0"), masked.view("1")]

    def using(name: str) -> None:
        with masked.using(name):
            masked(images)

    arrangements: dict[str, list[Call]] = {
        "one thread, a view": [lambda: views[0](images)],
        "one thread, the masked model": [lambda: masked(images)],
        "two threads, two masks, views": [lambda: views[0](images), lambda: views[1](images)],
        "two threads, one mask, one view": [lambda: views[0](images), lambda: views[0](images)],
        "two threads, one mask, the lock": [lambda: masked(images), lambda: masked(images)],
        "two threads, two masks, the lock": [lambda: using("0"), lambda: using("1")],
    }
    masked.set_mask("0")
    found: dict[str, list[float]] = {name: [] for name in arrangements}
    for turn in range(REPEATS + 1):
        for name, calls in arrangements.items():
            rate = len(images) * calls_a_second(calls, SECONDS if turn else 0.1)  # the first is for warming up
            if turn:
                found[name].append(rate)
    return found


def calls_a_second(calls: list[Call], seconds: float) -> float:
    """Each in a thread of its own, again and again until the time is up."""
    counts, start = [0] * len(calls), threading.Barrier(len(calls) + 1)
    over = threading.Event()

    def work(number: int) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            start.wait()
            while not over.is_set():
                calls[number]()
                counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    start.wait()
    begin = time.perf_counter()
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)


def costs(masked: MaskedModel) -> str:
    """What a view takes: time to make it, and memory."""
    seconds = {"view": list[float](), "set_mask": list[float]()}
    for turn in range(REPEATS):
        for what in ("view", "set_mask"):
            begin = time.perf_counter()
            getattr(masked, what)(str(turn % 2))
            seconds[what].append(time.perf_counter() - begin)
    shared = {parameter.data_ptr() for parameter in masked.base.parameters()}
    own = [value for value in masked.view("0").state_dict().values() if value.data_ptr() not in shared]
    own_bytes = sum(value.numel() * value.element_size() for value in own)
    total = sum(value.numel() * value.element_size() for value in masked.base.state_dict().values())
    view, switch = (statistics.median(each) * 1e3 for each in seconds.values())
    return (
        f"A view takes {view:.0f} ms to make (set_mask: {switch:.0f} ms), and {own_bytes:,} bytes of its own; "
        f"the base has {total:,}"
    )


if __name__ == "__main__":
    sys.exit(main())
