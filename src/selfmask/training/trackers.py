"""Where the log goes besides log.jsonl: TensorBoard, and others that people have accounts with."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, MissingExtraError

Log = Callable[[dict[str, float], int], None]


class Trackers:
    """Passes every line of the log on. They start with the first line: only then is it known where a run goes on."""

    def __init__(self, names: Sequence[str], folder: Path | None, config: Mapping[str, Any]) -> None:
        """`folder` is None in processes that do not write."""
        if unknown := set(names) - set(_KINDS):
            raise ConfigError("unknown tracker", expected=", ".join(_KINDS), found=", ".join(sorted(unknown)))
        self._names, self._folder, self._config = names, folder, config
        self._started: list[tuple[Log, Callable[[], None]]] = []

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        for _log, close in self._started:
            close()

    def line(self, line: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        step = int(line["step"])
        if not self._started:
            self._started = [_KINDS[name](self._folder, self._config, step) for name in self._names]
        numbers = {key: float(value) for key, value in line.items() if key != "step"}
        for log, _close in self._started:
            log(numbers, step)


def _tensorboard(folder: Path, config: Mapping[str, Any], step: int) -> tuple[Log, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    # What a killed run logged after its last checkpoint is hidden: it happens again now.
    writer = SummaryWriter(str(folder / "events"), purge_step=step)

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(folder: Path, config: Mapping[str, Any], step: int) -> tuple[Log, Callable[[], None]]:
    run = _extra("wandb").init(project="selfmask", name=folder.name, dir=str(folder), config=dict(config))
    return lambda numbers, step: run.log(numbers, step=step), run.finish


def _mlflow(folder: Path, config: Mapping[str, Any], step: int) -> tuple[Log, Callable[[], None]]:
    mlflow = _extra("mlflow")
    mlflow.set_experiment("selfmask")
    mlflow.start_run(run_name=folder.name)
    return lambda numbers, step: mlflow.log_metrics(numbers, step=step), mlflow.end_run


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"{module} is not installed", todo="pip install 'selfmask[track]'") from error


_KINDS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
