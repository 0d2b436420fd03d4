"""The run folder: one writer, whole files, and plain words when something is wrong."""

from __future__ import annotations

import json
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from selfmask.errors import (
    ForeignFolderError,
    RunBusyError,
    RunDamagedError,
    RunExistsError,
    RunMismatchError,
    RunWriteError,
)
from selfmask.training import RunFolder

from ..processes import PROCESSES

CONFIG = {"steps": 3, "views": {"size": 32, "scale": (0.1, 1.0)}}


def open_run(path: Path, resume: bool = False, **changes: object) -> RunFolder:
    folder = RunFolder(path, resume=resume)
    folder.begin({"verb": "adapt"}, CONFIG | changes, {"data": "of these images"})
    return folder


def finished_run(path: Path) -> None:
    with open_run(path) as folder:
        folder.save_checkpoint("last", {"step": 3})


def test_a_new_run_says_what_it_is(tmp_path: Path) -> None:
    with open_run(tmp_path / "a" / "run") as folder:
        assert json.loads((folder.path / "config.json").read_text())["config"]["steps"] == 3
        assert json.loads((folder.path / "environment.json").read_text())["packages"]["torch"] in torch.__version__
        assert folder.result is None


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    finished_run(tmp_path)
    with pytest.raises(RunExistsError, match="--resume"):
        open_run(tmp_path)


def test_resuming_with_the_same_settings_is_fine_and_with_others_says_which(tmp_path: Path) -> None:
    finished_run(tmp_path)
    open_run(tmp_path, resume=True).close()
    with pytest.raises(RunMismatchError, match=r"views.size = 32[\s\S]*views.size = 64"):
        open_run(tmp_path, resume=True, views={"size": 64, "scale": (0.1, 1.0)})


def test_a_run_that_has_saved_nothing_can_be_begun_with_other_settings(tmp_path: Path) -> None:
    open_run(tmp_path).close()
    open_run(tmp_path, steps=5).close()
    assert json.loads((tmp_path / "config.json").read_text())["config"]["steps"] == 5


def test_resuming_nothing_begins(tmp_path: Path) -> None:
    """A run may have been killed before it wrote anything."""
    open_run(tmp_path / "new", resume=True).close()
    assert (tmp_path / "new" / "config.json").exists()


def test_what_a_killed_run_left_half_written_is_removed_and_nothing_else(tmp_path: Path) -> None:
    finished_run(tmp_path)
    for name in (".selfmask-0123456789abcdef.tmp", "checkpoints/.selfmask-0123456789abcdef.tmp"):
        (tmp_path / name).write_text("half")
    mine = [".0123456789abcdef.tmp", ".mine.tmp", "a.tmp", ".selfmask-notes.tmp"]
    for name in mine:
        (tmp_path / name).write_text("keep")
    open_run(tmp_path, resume=True).close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.pt"]
    assert {path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"} == set(mine)


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(file.relative_to(folder)): (file.read_text(), file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file()
    }


FOREIGN = [
    {"config.json": '{"port": 80}', "report.html": "mine", ".cache.tmp": "mine"},
    {"config.json": '{"verb": "adapt"}'},
    {"config.json": "[1, 2]"},
    {"config.json": "{"},
    {"log.jsonl": '{"level": "info"}\n'},
    {"lock": ""},
    {"lock.txt": "pid 7"},
    {"result.json": "{}", "environment.json": "{}"},
    {"checkpoints/last.pt": "mine"},
    {"photo.jpg": "mine"},
]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("files", FOREIGN)
def test_a_folder_that_is_no_run_is_refused_and_not_touched(
    tmp_path: Path, files: dict[str, str], resume: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(ForeignFolderError, match="nothing was changed") as caught:
        open_run(tmp_path, resume)
    assert sorted(files)[0].partition("/")[0] in str(caught.value)
    assert contents(tmp_path) == before
    assert not list(tmp_path.glob("selfmask*"))


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_was_killed_before_it_wrote_anything_is_a_run(tmp_path: Path, resume: bool) -> None:
    RunFolder(tmp_path, resume=False).close()
    (tmp_path / ".selfmask-0123456789abcdef.tmp").write_text("half")  # of its first file
    open_run(tmp_path, resume).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "environment.json", "selfmask.lock"]


def test_a_run_of_an_earlier_release_is_a_run(tmp_path: Path) -> None:
    finished_run(tmp_path)
    (tmp_path / "selfmask.lock").rename(tmp_path / "lock")
    open_run(tmp_path, resume=True).close()


def hold(path: Path, told: Connection) -> None:
    """In another process: says whether it got the folder whenever it is asked, and keeps what it got."""
    while told.recv():
        try:
            folder = RunFolder(path, resume=True)
            told.send("ready")
        except RunBusyError:
            told.send("busy")
    folder.close()


@pytest.mark.heavy  # what one process sees of another; cli/test_adapt has it, too, without the murder
def test_two_runs_cannot_share_a_folder_and_a_killed_one_frees_it(tmp_path: Path) -> None:
    """Whether they are of one process or of two."""
    mine, its = PROCESSES.Pipe()
    other = PROCESSES.Process(target=hold, args=(tmp_path, its))
    other.start()
    try:
        with open_run(tmp_path):
            with pytest.raises(RunBusyError):
                open_run(tmp_path, resume=True)
            mine.send("?")
            assert mine.recv() == "busy"  # the refusal has not let go of the lock
        open_run(tmp_path, resume=True).close()
        mine.send("?")
        assert mine.recv() == "ready"
        with pytest.raises(RunBusyError, match="another run"):
            RunFolder(tmp_path, resume=True)
    finally:
        other.kill()
        other.join()
    RunFolder(tmp_path, resume=True).close()


def test_the_log_is_cut_back_to_the_checkpoint_and_survives_a_torn_line(tmp_path: Path) -> None:
    with open_run(tmp_path) as folder:
        for step in range(1, 6):
            folder.log({"step": step, "loss": 1.5})
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write('{"step": 6, "lo')
        assert len(folder.read_log()) == 5
        folder.forget_log_after(3)
        assert [line["step"] for line in folder.read_log()] == [1, 2, 3]
        folder.log({"step": 4, "loss": 1.0})
        assert len(folder.read_log()) == 4


@pytest.mark.parametrize("line", ['{"level": "info"}', "[1]", "7", '{"step": "one"}', '{"step": 1, "loss": null}'])
def test_a_log_of_something_else_is_named(tmp_path: Path, line: str) -> None:
    with open_run(tmp_path) as folder:
        folder.log({"step": 1, "loss": 1.5})
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write(f"{line}\n")
        with pytest.raises(RunDamagedError, match="line 2"):
            folder.read_log()


def test_the_log_is_on_the_disk_before_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = list[str](), os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    with open_run(tmp_path) as folder:
        folder.log({"step": 1, "loss": 1.5})
        monkeypatch.setattr(os, "fsync", record)
        folder.save_checkpoint("last", {"step": 1})
    assert synced[0] == "log.jsonl"
    assert synced[1].endswith(".tmp")  # the checkpoint, not yet under its name
    assert synced[2] == "checkpoints"  # the folder: its new name


def test_checkpoints_come_back_and_damaged_ones_are_named(tmp_path: Path) -> None:
    with open_run(tmp_path) as folder:
        assert folder.load_checkpoint("last") is None
        folder.save_checkpoint("last", {"step": 7, "model": {"w": torch.arange(3)}})
        loaded = folder.load_checkpoint("last")
        assert loaded is not None
        assert loaded["step"] == 7
        assert torch.equal(loaded["model"]["w"], torch.arange(3))
        file = tmp_path / "checkpoints" / "last.pt"
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(RunDamagedError, match=r"last.pt"):
            folder.load_checkpoint("last")


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("ran",)

    with open_run(tmp_path) as folder:
        (tmp_path / "checkpoints").mkdir()
        torch.save({"step": Evil()}, tmp_path / "checkpoints" / "last.pt")
        with pytest.raises(RunDamagedError):
            folder.load_checkpoint("last")


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    finished_run(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunDamagedError, match=r"config.json"):
        open_run(tmp_path, resume=True)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunWriteError, match="cannot write"):
        open_run(tmp_path / "run")
