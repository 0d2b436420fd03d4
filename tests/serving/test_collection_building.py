"""How collections are built: stopped and resumed, beside others, and where something is in the way."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from selfmask.commands.opening import load_embedder
from selfmask.data import open_images
from selfmask.embedding.vectors import Progress
from selfmask.errors import (
    CollectionError,
    CollectionWriteError,
    ForeignFolderError,
    ImagesChangedError,
    RunBusyError,
)
from selfmask.serving import building
from selfmask.serving.building import Settings, build_collection
from selfmask.serving.collection import Collection
from selfmask.serving.spaces import Source
from tests.embedding.samples import pictures

from .indexed import clothes, indexed, save_run, silent
from .served import BACKBONE

pytestmark = pytest.mark.usefixtures("few_points")


def stopping(after: int) -> Any:
    """A stage that is interrupted at the nth sign of progress, of whichever part."""
    left = [after]

    @contextmanager
    def stage(_: str) -> Iterator[Progress]:
        def progress(done: int, total: int) -> None:
            left[0] -= 1
            if left[0] <= 0:
                raise KeyboardInterrupt

        progress(0, 1)
        yield progress

    return stage


def contents(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_stopped_at_any_point_it_goes_on_to_the_same_collection(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "APPROXIMATE_FROM", 10)
    indexed(tmp_path / "whole", runs[0], images=clothes(20), batch_size=8)
    out, stops = tmp_path / "c", 0
    for after in range(1, 40):
        try:
            indexed(out, runs[0], images=clothes(20), stage=stopping(after), batch_size=8)
        except KeyboardInterrupt:
            stops += 1
            assert not out.exists()
        else:
            break
    assert stops >= 5
    assert contents(out) == contents(tmp_path / "whole")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c", "whole"]


def test_work_for_other_inputs_is_not_used(runs: tuple[Path, Path], tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        indexed(tmp_path / "c", runs[0], images=clothes(8), stage=stopping(4))
    assert (tmp_path / "c.partial").is_dir()
    indexed(tmp_path / "c", runs[1], images=clothes(8), say=said.append)
    assert any("other inputs" in line for line in said)
    with Collection.open(tmp_path / "c") as found:
        assert list(found.spaces) == ["frozen", "cats"]


def test_what_stands_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    with pytest.raises(ForeignFolderError, match="not a collection"):
        indexed(tmp_path / "mine", BACKBONE)
    (tmp_path / "c.partial").mkdir()
    (tmp_path / "c.partial/letter.txt").write_text("dear")
    with pytest.raises(ForeignFolderError, match="no unfinished collection"):
        indexed(tmp_path / "c", BACKBONE)
    assert (tmp_path / "mine/letter.txt").read_text() == (tmp_path / "c.partial/letter.txt").read_text() == "dear"
    indexed(tmp_path / "d", BACKBONE, images=clothes(5))
    with pytest.raises(ForeignFolderError, match="already"):
        indexed(tmp_path / "d", BACKBONE, images=clothes(5))


def test_two_writers_are_kept_apart(tmp_path: Path) -> None:
    @contextmanager
    def stage(name: str) -> Iterator[Progress]:
        with pytest.raises(RunBusyError):
            indexed(tmp_path / "c", BACKBONE, images=clothes(8))
        yield lambda done, total: None

    indexed(tmp_path / "c", BACKBONE, images=clothes(8), stage=stage)


def test_images_that_change_meanwhile_are_noticed(tmp_path: Path) -> None:
    photos = pictures(tmp_path / "photos", 8)

    @contextmanager
    def stage(name: str) -> Iterator[Progress]:
        if name == "thumbnails":
            shutil.copy(photos / "0000.png", photos / "0001.png")
        yield lambda done, total: None

    with pytest.raises(ImagesChangedError):
        indexed(tmp_path / "c", BACKBONE, images=open_images(photos), stage=stage)
    assert not (tmp_path / "c").exists()
    indexed(tmp_path / "c", BACKBONE, images=open_images(photos))


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(building, "write_thumbnails", full)
        with pytest.raises(CollectionWriteError, match="free some space"):
            indexed(tmp_path / "c", BACKBONE, images=clothes(8))
    assert indexed(tmp_path / "c", BACKBONE, images=clothes(8)).resumed == 8


def test_runs_of_other_backbones_are_kept_apart(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Two runs that were made with images of other sizes."""
    embedders = [load_embedder(str(run), size=size) for run, size in zip(runs, (32, 48), strict=True)]
    sources = [Source(name, each) for name, each in zip("ab", embedders, strict=True)]
    with pytest.raises(CollectionError, match="one collection"):
        build_collection(tmp_path / "c", sources, clothes(5), Settings(), title="", stage=silent, say=lambda _: None)


def test_names_of_runs_that_are_the_same_are_told_apart(tmp_path: Path) -> None:
    for number, place in enumerate(("a", "b")):
        save_run(tmp_path / place / "run", seed=number)
    about = indexed(tmp_path / "c", tmp_path / "a/run", tmp_path / "b/run", images=clothes(8)).about
    assert [space.name for space in about.spaces] == ["frozen", "run", "run-2"]
