"""Locks: one writer at a time, on every system, and every other failure under its own name."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import selfmask
from selfmask import locks
from selfmask.errors import FeaturesWriteError, NoLocksError, RunBusyError, RunWriteError
from selfmask.locks import Lock


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "new" / "lock", "it")
    with pytest.raises(RunBusyError, match="writing to it"):
        Lock(tmp_path / "new" / ".." / "new" / "lock", "it")
    lock.close()
    lock.close()
    Lock(tmp_path / "new" / "lock", "it").close(remove=True)
    assert not (tmp_path / "new" / "lock").exists()


def test_one_thread_at_a_time(tmp_path: Path) -> None:
    """Locks of the system are the process's, so threads need more: of eight that try at once, one gets it."""
    for round_ in range(20):
        held: list[Lock] = []
        ready, tried = threading.Barrier(8), threading.Barrier(8)

        def work(file: Path, held: list[Lock], ready: threading.Barrier, tried: threading.Barrier) -> None:
            ready.wait()
            with suppress(RunBusyError):
                held.append(Lock(file, "a folder"))
            tried.wait()

        file = tmp_path / f"{round_}.lock"
        threads = [threading.Thread(target=work, args=(file, held, ready, tried)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1
        held[0].close()
        again = Lock(file, "a folder")
        held[0].close()  # once more: it is not the first one's any longer
        with pytest.raises(RunBusyError):
            Lock(file, "a folder")
        again.close()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EAGAIN, RunBusyError),
        (errno.EACCES, RunBusyError),
        (errno.ENOLCK, NoLocksError),
        (errno.ENOTSUP, NoLocksError),
        (errno.EIO, NoLocksError),
    ],
)
def test_why_a_lock_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks, "_take", refuse)
    with pytest.raises(kind) as caught:
        Lock(tmp_path / "lock", "runs/a")
    assert "runs/a" in str(caught.value)
    if kind is NoLocksError:
        assert os.strerror(number) in str(caught.value)
    monkeypatch.undo()
    Lock(tmp_path / "lock", "runs/a").close()  # nothing is held


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EROFS, "make the folder writable"),
        (errno.EACCES, "make the folder writable"),
        (errno.ENOSPC, "free some"),
    ],
)
def test_why_a_lock_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    for kind in (RunWriteError, FeaturesWriteError):
        with pytest.raises(kind, match=advice) as caught:
            Lock(tmp_path / "lock", "runs/a", kind)
        assert os.strerror(number) in str(caught.value)


def test_a_lock_that_its_holder_removed_just_now_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before, locked after: two could hold it, each another file of the same name."""
    take, calls = locks._take, []

    def slowly(descriptor: int) -> None:
        if not calls:
            (tmp_path / "lock").unlink()
        calls.append(descriptor)
        take(descriptor)

    monkeypatch.setattr(locks, "_take", slowly)
    lock = Lock(tmp_path / "lock", "it")
    assert len(calls) == 2
    assert os.path.samestat(os.fstat(lock._descriptor), (tmp_path / "lock").stat())
    lock.close()


WINDOWS = """
import sys, types
sys.modules["fcntl"] = None
if {msvcrt}:
    calls = []
    sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=lambda *given: calls.append(given))
else:
    sys.modules["msvcrt"] = None
from pathlib import Path
from selfmask.errors import NoLocksError
from selfmask.locks import Lock
try:
    lock = Lock(Path(sys.argv[1]), "it")
    assert calls == [(lock._descriptor, 2, 1)], calls
    lock.close()
    print("locked")
except NoLocksError as error:
    print(error)
"""


@pytest.mark.parametrize(("msvcrt", "said"), [(True, "locked"), (False, "no locks")])
def test_without_fcntl_as_on_windows(tmp_path: Path, msvcrt: bool, said: str) -> None:
    code = WINDOWS.format(msvcrt=msvcrt)
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "lock"], capture_output=True, text=True, check=True)
    assert said in done.stdout


def test_no_module_of_one_system_is_imported() -> None:
    """Importing would fail on the others."""
    own = {"fcntl", "msvcrt", "resource", "termios", "pwd", "grp", "winreg"}
    for file in Path(selfmask.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not own & set(names), file
