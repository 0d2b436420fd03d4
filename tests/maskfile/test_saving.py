"""Saving is atomic: whatever happens, the name holds the old file or the new one, whole, and nothing is left beside."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from selfmask import MaskedModel
from selfmask.errors import MaskFileError, MaskWriteError
from selfmask.plain import plain

from ..processes import PROCESSES
from .tiny import Tiny, masked_with

Saver = Callable[[Path], int]


@pytest.fixture
def save(base: Tiny) -> Saver:
    masked = masked_with(base, "dense")
    return lambda path: masked.save_pretrained(path, notes="new")


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Within, the kernel refuses to let any file grow beyond `limit` bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error of write(), not the death of the process
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)


def refused(save: Saver, path: Path) -> MaskWriteError:
    with pytest.raises(MaskWriteError) as caught:
        save(path)
    for part in (plain(str(path)), "expected:", "found:", "do:"):
        assert part in str(caught.value)
    assert isinstance(caught.value, OSError), "callers who know nothing of us catch OSError"
    return caught.value


# ---- when writing fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 100, 1000])
def test_a_full_disk_leaves_the_old_file_whole(save: Saver, tmp_path: Path, limit: int) -> None:
    path = tmp_path / "a.smn"
    save(path)
    old = path.read_bytes()
    assert len(old) > limit
    with full_disk(limit):
        refused(save, path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_nothing_where_nothing_was(save: Saver, tmp_path: Path) -> None:
    with full_disk(100):
        refused(save, tmp_path / "a.smn")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_saving_leaves_nothing_beside(
    save: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large files take time to reach the disk, and people are impatient."""
    path = tmp_path / "a.smn"
    save(path)
    old = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_where_a_file_is_expected(save: Saver, tmp_path: Path) -> None:
    (tmp_path / "a.smn").mkdir()
    (tmp_path / "a.smn" / "precious").write_text("keep me")
    assert "folder" in str(refused(save, tmp_path / "a.smn"))
    assert (tmp_path / "a.smn" / "precious").read_text() == "keep me"
    assert list(tmp_path.iterdir()) == [tmp_path / "a.smn"]


def test_a_folder_that_is_a_file(save: Saver, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    refused(save, tmp_path / "file" / "a.smn")
    refused(save, tmp_path / "file" / "deeper" / "a.smn")
    assert (tmp_path / "file").read_text() == "no folder"


def test_a_folder_that_cannot_be_written(save: Saver) -> None:
    """Not even root can create files in /proc."""
    refused(save, Path("/proc/a.smn"))
    refused(save, Path("/proc/folder/a.smn"))


def test_names_no_file_can_have(save: Saver, tmp_path: Path) -> None:
    refused(save, tmp_path / ("x" * 300))
    refused(save, tmp_path / "a\0b.smn")
    assert list(tmp_path.iterdir()) == []


def test_the_longest_name_a_file_can_have(save: Saver, tmp_path: Path) -> None:
    """The temporary name must not be what makes it too long."""
    save(tmp_path / ("x" * 251 + ".smn"))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_relative_path_saves_in_the_working_folder(
    save: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path("a.smn"))
    assert (tmp_path / "a.smn").is_file()


# ---- who may read it --------------------------------------------------------------------------------------------


@contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0o000])
def test_permissions_follow_the_umask(save: Saver, tmp_path: Path, mask: int) -> None:
    """As any program's files: readable for the group of a shared folder, private where the user wants it so."""
    with umask(mask):
        save(tmp_path / "a.smn")
        save(tmp_path / "a.smn")  # over an old one
        assert (tmp_path / "a.smn").stat().st_mode & 0o777 == 0o666 & ~mask


def test_saving_never_touches_the_umask(save: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the whole process: touching it from two threads can leave every later file open to all."""

    def touched(mask: int) -> int:
        raise AssertionError("to read the umask is to set it")

    monkeypatch.setattr(os, "umask", touched)
    save(tmp_path / "a.smn")


# ---- several writers, sudden death ------------------------------------------------------------------------------


def write_over_and_over(target: Path, sources: list[Path], told: Connection) -> None:
    """In another process: say when ready, wait for a word, and write until killed."""
    models = [MaskedModel.from_pretrained(Tiny(), source) for source in sources]
    told.send("ready")
    told.recv()
    for masked in itertools.cycle(models):
        masked.save_pretrained(target)


@pytest.mark.heavy
def test_writers_that_race_and_die_leave_a_whole_file(tmp_path: Path) -> None:
    """Three processes write one name over and over: a reader sees a whole file at any time, and after they died."""
    known = {}
    for i, kind in enumerate(("sparse", "dense", "stripes")):
        masked = masked_with(Tiny(), kind)
        # Megabytes that cannot be compressed, so that a write takes long enough to be caught in the middle.
        notes, head = random.Random(i).randbytes(1_000_000).hex(), {"w": torch.full((2900,), float(i))}
        masked.save_pretrained(tmp_path / f"{i}.smn", head=head, notes=notes)
        known[masked.pack().sha256] = float(i)
    sources = sorted(tmp_path.iterdir())
    target = tmp_path / "out" / "a.smn"
    target.parent.mkdir()
    target.write_bytes(sources[0].read_bytes())
    writers, pipes = [], []
    for i in range(3):
        mine, its = PROCESSES.Pipe()
        writer = PROCESSES.Process(target=write_over_and_over, args=(target, [*sources[i:], *sources[:i]], its))
        writer.start()
        writers.append(writer)
        pipes.append(mine)
    try:
        for pipe in pipes:
            assert pipe.recv() == "ready"
        for pipe in pipes:
            pipe.send("go")
        masked = MaskedModel(Tiny())
        rng = random.Random(0)
        seen = []
        give_up = time.monotonic() + 30
        while len(seen) < 40 or (len(set(seen)) < 2 and time.monotonic() < give_up):
            masked.load_mask(target, "a")
            mask = masked._packed["a"]
            assert torch.equal(mask.head["w"], torch.full((2900,), known[mask.sha256]))
            masked.delete_mask("a")
            seen.append(mask.sha256)
            time.sleep(rng.random() * 0.01)
        assert len(set(seen)) > 1, "the writers did not write"
        for writer in writers:  # one after the other, each at some moment of its work
            assert writer.is_alive()
            writer.kill()
            writer.join()
            masked.load_mask(target, "a")
            masked.delete_mask("a")
            time.sleep(rng.random() * 0.02)
    finally:
        for writer in writers:
            writer.kill()
            writer.join()
    # Temporary files of the killed may remain (nobody was left to remove them), but hidden and never as a .smn.
    assert [path.name for path in target.parent.iterdir() if not path.name.startswith(".")] == ["a.smn"]
    assert not [path for path in target.parent.glob("*.smn") if path != target]


def test_threads_that_race_leave_a_whole_file(base: Tiny, tmp_path: Path) -> None:
    """Writers in one process, and a reader beside them."""
    models = [masked_with(Tiny(), "dense", variant=10 * i) for i in range(4)]
    known = {masked.pack().sha256 for masked in models}
    path = tmp_path / "a.smn"
    models[0].save_pretrained(path)
    errors: list[BaseException] = []

    def work(masked: MaskedModel) -> None:
        try:
            for _ in range(25):
                masked.save_pretrained(path)
        except MaskFileError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(masked,)) for masked in models]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert MaskedModel.from_pretrained(base, path).pack().sha256 in known
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(tmp_path.iterdir()) == [path]
