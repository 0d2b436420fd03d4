"""`doctor`: what this machine has, and whether what training needs works on it, tried and not guessed."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from ..backbones import load_backbone
from ..data import SomeImages, open_images
from ..files import RunFile
from ..memory import memory_left
from ..running import best_device
from ..training.config import Precision
from .adapt import adapt
from .adapt_config import AdaptConfig

BACKBONE, IMAGES = "selfmask/tiny", "selfmask/fashion"
_PACKAGES = ("selfmask", "torch", "torchvision", "timm", "numpy", "scikit-learn", "safetensors", "accelerate")
_EXTRA = re.compile(r"""^([\w.-]+).*;\s*extra\s*==\s*['"]([\w-]+)['"]""")
_NOT_FOR_USERS = ("dev", "bench")
_STEPS, _SECONDS = 6, 180  # of a try, at most


@dataclasses.dataclass(frozen=True)
class Try:
    """What was tried, whether it worked, how long it took, and what it came to or why it failed."""

    name: str
    works: bool
    seconds: float
    note: str


def facts() -> dict[str, Any]:
    """What there is: packages, devices, memory, disk, extras."""
    memory = psutil.virtual_memory()
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": {"cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "gpus": [_gpu(number) for number in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "memory_bytes": memory.total,
        "memory_left_bytes": memory_left(memory.available),
        "disk_left_bytes": shutil.disk_usage(Path.cwd()).free,
        "extras": extras(),
    }


def extras() -> dict[str, list[str]]:
    """What is missing of each extra; nothing, if it can be used."""
    found: dict[str, list[str]] = {}
    try:
        needed = requires("selfmask") or []
    except PackageNotFoundError:
        return {}
    for line in needed:
        if (match := _EXTRA.match(line)) is not None and match[2] not in _NOT_FOR_USERS:
            missing = found.setdefault(match[2], [])
            if _version(match[1]) is None:
                missing.append(match[1])
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu(number: int) -> dict[str, Any]:
    about = torch.cuda.get_device_properties(number)
    return {"name": about.name, "memory_bytes": about.total_memory, "capability": f"{about.major}.{about.minor}"}


def tries(say: Callable[[str], None] = print) -> list[Try]:
    """Train for a few steps in every way that a run may ask for, on the GPU if there is one."""
    done = []
    with tempfile.TemporaryDirectory() as place:
        for name, run in _TRIES.items():
            say(f"trying {name}")
            start = time.monotonic()
            try:
                note, works = run(Path(place) / name.replace(" ", "-")), True
            except Exception as error:  # whatever it is, it is what this machine does
                note, works = next(iter(str(error).splitlines()), type(error).__name__)[:300], False
            done.append(Try(name, works, time.monotonic() - start, note))
    return done


def _adapted(out: Path | None, *, watch: Any = None, resume: bool = False, **changes: Any) -> Any:
    backbone, images = load_backbone(BACKBONE), SomeImages(open_images(IMAGES), range(64))
    given = {"steps": _STEPS, "batch_size": 8, "log_every": 2, "checkpoint_every": 2, "gate": False, **changes}
    return adapt(
        backbone.model,
        images,
        AdaptConfig.preset("fast", track=(), **given),
        out=out,
        resume=resume,
        preprocessing=backbone.preprocessing,
        report=False,
        watch=watch,
    )


def _losses(result: Any) -> str:
    lost = [line["loss"] for line in result.log]
    if not all(loss == loss and abs(loss) != float("inf") for loss in lost):
        raise RuntimeError(f"the loss is not a number: {lost}")
    return f"{_STEPS} steps on {best_device().type}, loss {lost[-1]:.3f}"


def _plain(folder: Path) -> str:
    return _losses(_adapted(folder, precision="float32"))


def _mixed(folder: Path) -> str:
    precision: Precision = "bfloat16"
    return _losses(_adapted(folder, precision=precision))


def _compiled(folder: Path) -> str:
    return _losses(_adapted(folder, compile=True, precision="float32"))


def _resumed(folder: Path) -> str:
    """A run that is stopped half-way, and continued, ends in the same mask."""

    class _StopError(Exception):
        pass

    def stop(model: nn.Module, line: Mapping[str, Any]) -> None:
        if line["step"] >= _STEPS - 2:
            raise _StopError

    whole, cut = folder / "whole", folder / "cut"
    _adapted(whole, precision="float32")
    try:
        _adapted(cut, watch=stop, precision="float32")
    except _StopError:
        _adapted(cut, resume=True, precision="float32")
    same = (whole / RunFile.MASK).read_bytes() == (cut / RunFile.MASK).read_bytes()
    if not same:
        raise RuntimeError("a resumed run ended in another mask")
    return "stopped, resumed, and the same mask to the bit"


def _several(folder: Path) -> str:
    """Two processes, or one for each GPU."""
    count = max(2, torch.cuda.device_count()) if torch.cuda.device_count() != 1 else 1
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"),
        *("-m", "selfmask", "adapt", IMAGES, "--backbone", BACKBONE, "--steps", str(_STEPS), "--batch-size", "8"),
        *("--no-gate", "--most-images", "64", "--out", str(folder)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)  # noqa: S603 - our own words
    if done.returncode or not (folder / RunFile.MASK).is_file():
        lines = done.stderr.strip().splitlines() or ["no message"]
        ours = (line for line in lines if line.startswith("error"))  # torchrun adds pages after it
        raise RuntimeError(next(ours, next((line for line in reversed(lines) if "Error" in line), lines[-1])))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    return f"{count} processes by torchrun ({backend}), {_STEPS} steps"


_TRIES: Mapping[str, Callable[[Path], str]] = {
    "a run": _plain,
    "mixed precision (AMP)": _mixed,
    "torch.compile": _compiled,
    "resume": _resumed,
    "several processes (DDP)": _several,
}
