"""Where the log goes besides log.jsonl: TensorBoard, and others that people have accounts with."""

from __future__ import annotations

import hashlib
import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError, MissingExtraError, RunWriteError
from ..files import RunFile
from .folder import RunFolder

Log = Callable[[dict[str, float], int], None]


class Trackers:
    """Passes every line of the log on. They start with the first line: only then is it known where a run goes on."""

    def __init__(self, names: Sequence[str], folder: Path | None) -> None:
        """`folder` is None in processes that do not write."""
        if unknown := set(names) - set(_KINDS):
            raise ConfigError("unknown tracker", expected=", ".join(_KINDS), found=", ".join(sorted(unknown)))
        for name in names:
            _module(name)  # a missing one is told before the work
        self._names, self._folder = names, folder
        self._started: list[tuple[Log, Callable[[], None]]] = []
        self._hook = threading.excepthook

    def __enter__(self) -> Trackers:
        threading.excepthook = self._failed_in_a_thread
        return self

    def __exit__(self, *_: object) -> None:
        for _log, close in self._started:
            with suppress(OSError):  # a full disk is told by whoever met it first
                close()
        threading.excepthook = self._hook

    def _failed_in_a_thread(self, failed: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread of its own: what fails there is raised with the next line, as ours, too."""
        if not (issubclass(failed.exc_type, OSError) and type(failed.thread).__module__.startswith("tensorboard")):
            self._hook(failed)

    def line(self, line: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        step = int(line["step"])
        numbers = {key: float(value) for key, value in line.items() if key != "step" and isinstance(value, int | float)}
        try:
            if not self._started:
                self._started = [_KINDS[name](self._folder, step) for name in self._names]
            for log, _close in self._started:
                log(numbers, step)
        except OSError as error:
            todo = "free some disk space, then continue with --resume"
            raise RunWriteError("the log could not be written for a tracker", found=error, todo=todo) from error


def _tensorboard(folder: Path, step: int) -> tuple[Log, Callable[[], None]]:
    # What a killed run logged after its last checkpoint is hidden: it happens again now.
    writer = _module("tensorboard").SummaryWriter(str(folder / "events"), purge_step=step)

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(folder: Path, step: int) -> tuple[Log, Callable[[], None]]:
    # The same folder is the same run, also when it is resumed.
    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    config = RunFolder.read_json(folder / RunFile.CONFIG)
    run = _module("wandb").init(
        project="selfmask", name=folder.name, dir=str(folder), config=config, id=identity, resume="allow"
    )
    return lambda numbers, step: run.log(numbers, step=step), run.finish


def _mlflow(folder: Path, step: int) -> tuple[Log, Callable[[], None]]:
    mlflow = _module("mlflow")
    mlflow.set_experiment("selfmask")
    mlflow.start_run(run_name=folder.name)
    return lambda numbers, step: mlflow.log_metrics(numbers, step=step), mlflow.end_run


def _module(name: str) -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError as error:
        extra = name if name == "tensorboard" else "track"
        raise MissingExtraError(f"{name} is not installed", todo=f"pip install 'selfmask[{extra}]'") from error


_KINDS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
