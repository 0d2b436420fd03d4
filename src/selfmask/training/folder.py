"""The folder of a run: everything that belongs to it, written so that a crash at any moment loses little.

selfmask.lock                   that this folder is ours; held by whoever writes to it
config.json, environment.json   what was asked for, and on what
log.jsonl, events/              how it went, for people and for TensorBoard
checkpoints/last.pt, best.pt    to go on from
mask.smn, report.html, result.json   what came out
"""

from __future__ import annotations

import io
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .. import checked
from ..errors import (
    ForeignFolderError,
    RunDamagedError,
    RunExistsError,
    RunMismatchError,
    RunWriteError,
    unwritable,
)
from ..files import LogKey, RunFile, remove_temporaries, write_atomically
from ..locks import Lock
from .config import ASIDE, Precision
from .processes import Processes

_NUMBERS = (LogKey.STEP, LogKey.LOSS, LogKey.SECONDS)  # what is asked of the lines of a log
_SHOWN = 3  # files that are named where a folder is refused


class RunFolder:
    """A run folder that this process, and no other, writes to. Use it as a context manager, or call `close`."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        known = _is_ours(path)
        self._lock = Lock(path / RunFile.LOCK, path)
        if not resume and self._has_work:
            self.close()
            raise RunExistsError(
                f"{self.path} already contains a run",
                todo=f"continue it: --resume {self.path}, or choose another folder: --out",
            )
        if known:  # half-written by a run that was killed here
            remove_temporaries(path, path / "checkpoints")

    @property
    def _has_work(self) -> bool:
        names = (RunFile.BEST, RunFile.LAST, RunFile.MASK, RunFile.RESULT, RunFile.CELLS, RunFile.ROUTER)
        return any((self.path / name).exists() for name in names)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lock.close()

    def begin(
        self,
        about: Mapping[str, Any],
        config: Mapping[str, Any],
        facts: Mapping[str, Any],
        free: Sequence[str] = (),
    ) -> None:
        """Say what the run is, or see that it is the one that began here.

        about: names, of images and backbone say, that may change. config: the settings. facts: what else decides the
        result. Settings that only say how to log and save may change, and so may those that are `free`: what was asked
        for last is what the folder says.
        """
        content = json.loads(json.dumps({**about, "config": config, "facts": facts}))
        if not self._has_work:
            self.write_json(RunFile.ENVIRONMENT, environment())
            self.write_json(RunFile.CONFIG, content)
            return
        before = self.read_json(self.path / RunFile.CONFIG)
        if differ := differences(_deciding(before, free), _deciding(content, free)):
            raise RunMismatchError(
                f"{self.path} was started with other settings",
                expected=", ".join(f"{key} = {old!r}" for key, (old, _) in differ.items()),
                found=", ".join(f"{key} = {new!r}" for key, (_, new) in differ.items()),
                todo="resume with its original settings, or choose another folder: --out",
            )
        if any(before["config"].get(name) != content["config"].get(name) for name in free):
            self.write_json(RunFile.CONFIG, content)

    @property
    def begun_steps(self) -> int | None:
        """How long the run that began here is; None if none did."""
        steps: int | None = self._begun("steps")
        if self._has_work and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise self._silent("how many steps the run has")
        return steps

    @property
    def begun_precision(self) -> Precision | None:
        """What the run that began here computes with; None if none did."""
        precision: Precision | None = self._begun("precision")
        if self._has_work and precision not in ("float32", "bfloat16"):
            raise self._silent("what the run computes with")
        return precision

    @property
    def begun_by_name(self) -> bool | None:
        """Whether names chose what the run that began here holds out; None if none did."""
        return self._begun("held_out") is not None if self._has_work else None

    def _begun(self, fact: str) -> Any:
        if not self._has_work:
            return None
        facts = self.read_json(self.path / RunFile.CONFIG).get("facts")
        return facts.get(fact) if isinstance(facts, dict) else None

    def _silent(self, about: str) -> RunDamagedError:
        return RunDamagedError(
            f"{self.path / RunFile.CONFIG} does not say {about}", todo="start again in another folder: --out"
        )

    @staticmethod
    def read_json(file: Path) -> dict[str, Any]:
        """What a file of a run folder says; NaN is a number there: a loss may become it."""
        try:
            return checked.mapping(checked.document(checked.content(file), finite=False))
        except (OSError, ValueError) as error:
            raise RunDamagedError(
                f"{file} cannot be read",
                expected="a JSON object",
                found=getattr(error, "strerror", None) or error,
                todo="start again in another folder: --out",
            ) from error

    # ---- results ----------------------------------------------------------------------------------------------

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, (json.dumps(content, indent=2) + "\n").encode(), RunWriteError)

    @property
    def result(self) -> dict[str, Any] | None:
        """What the finished run came to; None until then."""
        file = self.path / RunFile.RESULT
        return self.read_json(file) if file.exists() else None

    # ---- log --------------------------------------------------------------------------------------------------

    def log(self, line: Mapping[str, Any]) -> None:
        try:
            with (self.path / RunFile.LOG).open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise _unwritable(self.path / RunFile.LOG, error) from error

    def _sync_log(self) -> None:
        """Bring to the disk what was logged."""
        try:
            with (self.path / RunFile.LOG).open("a") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise _unwritable(self.path / RunFile.LOG, error) from error

    def read_log(self) -> list[dict[str, Any]]:
        """All whole lines; the last one may have been cut off by a crash."""
        return read_log(self.path)

    @property
    def last_loss(self) -> float | None:
        """The loss in the last line of the log; None where that is lost, or no number."""
        lines = self.read_log()
        loss: float = lines[-1].get(LogKey.LOSS, math.nan) if lines else math.nan
        return loss if math.isfinite(loss) else None

    def forget_log_after(self, step: int) -> None:
        """Drop what was logged after the checkpoint that the run goes on from: it will be logged again."""
        kept = [line for line in self.read_log() if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomically(self.path / RunFile.LOG, text.encode(), RunWriteError)

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def save_checkpoint(self, name: str, state: Mapping[str, Any]) -> None:
        """Save a state; all that was logged before is on the disk first, so that no checkpoint is ahead of its log."""
        self._sync_log()
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        write_atomically(checkpoint_file(self.path, name), buffer.getbuffer(), RunWriteError)

    def load_checkpoint(self, name: str) -> dict[str, Any] | None:
        """The state that was saved under this name, or None."""
        return read_checkpoint(self.path, name)


def _is_ours(path: Path) -> bool:
    """Whether a run was begun in this folder; what is neither that nor empty is refused, and not touched."""
    try:
        there = sorted(each.name for each in path.iterdir()) if path.exists() else []
    except OSError as error:
        raise _unwritable(path, error) from error
    if RunFile.LOCK in there:
        return True
    if there and not _says_it_is_ours(path / RunFile.CONFIG):
        more = [f"and {len(there) - _SHOWN} more"] if len(there) > _SHOWN else []
        raise ForeignFolderError(
            f"{path} contains files, but no run",
            expected="a new or empty folder, or one that a run was started in",
            found=", ".join([*there[:_SHOWN], *more]),
            todo="choose another folder: --out (nothing was changed in this one)",
        )
    return bool(there)


def _says_it_is_ours(config: Path) -> bool:
    """Folders of earlier releases bear no mark, but what they say of their run could hardly be another's."""
    try:
        content = json.loads(config.read_bytes())
        return isinstance(content["verb"], str) and all(isinstance(content[key], dict) for key in ("config", "facts"))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def _is_line(line: object) -> bool:
    return (
        isinstance(line, dict)
        and LogKey.STEP in line
        and all(type(line.get(key, 0)) in (int, float) for key in _NUMBERS)
    )


def checkpoint_file(folder: Path, name: str) -> Path:
    return folder / "checkpoints" / f"{name}.pt"


def read_checkpoint(folder: Path, name: str) -> dict[str, Any] | None:
    """The state that a run saved under this name, or None; nothing in it can run code."""
    file = checkpoint_file(folder, name)
    if not file.exists():
        return None
    try:
        with file.open("rb") as opened:
            if (damaged := checked.archive(opened).testzip()) is not None:  # torch does not look at the sums
                raise ValueError(f"{damaged} has another sum")
            opened.seek(0)
            state = torch.load(opened, map_location="cpu", weights_only=True)
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__}")
    except Exception as error:  # torch raises a dozen kinds for damaged files
        raise RunDamagedError(
            f"the checkpoint {file} is damaged",
            found=type(error).__name__,
            todo=f"remove it to start again, or use another folder: --out; {file.parent} may contain another",
        ) from error
    return state


def read_log(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of the log of a run, which somebody else may be writing to."""
    file, lines = folder / RunFile.LOG, []
    try:
        text = file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise RunDamagedError(f"{file} cannot be read", found=error.strerror) from error
    for number, each in enumerate(text.splitlines(), 1):
        try:
            line = json.loads(each)
        except (ValueError, RecursionError):
            break
        if not _is_line(line):
            raise RunDamagedError(
                f"{file} is damaged at line {number}",
                expected="a line that a run has logged",
                found=each[:100].decode(errors="backslashreplace"),
                todo="remove the file (only the curves of the report need it), or start again: --out",
            )
        lines.append(line)
    return lines


@contextmanager
def open_folder(path: Path, resume: bool, processes: Processes) -> Iterator[RunFolder | None]:
    """The run folder in the main process, None in the others; an error there is an error in all."""
    opened: list[RunFolder] = []
    processes.from_main(lambda: opened.append(RunFolder(path, resume=resume)))
    with opened[0] if opened else nullcontext() as folder:
        yield folder


def _deciding(content: Mapping[str, Any], free: Sequence[str]) -> dict[str, Any]:
    """What of a config.json decides the result."""
    settings = {key: value for key, value in content.get("config", {}).items() if key not in free}
    return {**content.get("facts", {}), "config": _without_asides(settings)}


def _without_asides(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_asides(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key not in ASIDE
    }


def differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """What differs between two nested settings: dotted key -> (before, after)."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found[prefix + key] = old, new
    return found


def environment() -> dict[str, Any]:
    """What the run depends on besides its settings."""
    packages = ("selfmask", "torch", "torchvision", "timm", "numpy")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {name: version(name) for name in packages},
    }


def _unwritable(path: Path, error: OSError) -> RunWriteError:
    return RunWriteError(f"cannot write {path}", expected="a writable folder, on a disk with room", **unwritable(error))
