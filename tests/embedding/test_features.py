"""Files of vectors: right, whole, and the same whatever happened on the way."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from selfmask.data import Images, open_images
from selfmask.embedding import features
from selfmask.embedding.embedder import Embedder
from selfmask.embedding.features import Written, write_features
from selfmask.embedding.vectors import embed
from selfmask.errors import (
    BadImageError,
    EvaluationError,
    FeaturesWriteError,
    ImagesChangedError,
    MissingExtraError,
    RunBusyError,
)

from ..processes import PROCESSES
from .samples import HOW, embedder, pictures, tiny

ENDINGS = [".npz", ".parquet"]


class Numbered(Images):
    """Images of noise, each always the same; stops with an error at one of them if told so."""

    def __init__(self, count: int, stop_at: int | None = None, side: int = 16) -> None:
        super().__init__([f"image {i}" for i in range(count)])
        self.stop_at, self.side, self.asked = stop_at, side, list[int]()

    def load(self, i: int, *, near: int | None = None) -> Tensor:
        self.asked.append(i)
        if near is not None and i == self.stop_at:  # not while the set as a whole is looked at
            raise KeyboardInterrupt
        if i % 37 == 5:
            raise BadImageError("cannot read it", found=f"{i} is bad")
        noise = torch.Generator().manual_seed(i)
        return torch.randint(0, 256, (3, self.side, self.side), dtype=torch.uint8, generator=noise)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_PART", 16)


def read(path: Path) -> tuple[list[str], np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as file:  # without pickle, as is numpy's default
            assert file.files == ["names", "vectors"]
            return file["names"].tolist(), file["vectors"]
    table = pq.read_table(path)
    width = table.schema.field("vector").type.list_size
    assert table.schema.types == [pa.string(), pa.list_(pa.float32(), width)]
    values = table["vector"].combine_chunks().flatten().to_numpy()
    return table["name"].to_pylist(), values.reshape(-1, width)


def write(path: Path, images: Images, model: Embedder | None = None, batch_size: int = 8) -> tuple[Written, list[str]]:
    said = list[str]()
    return write_features(path, model or embedder(), images, batch_size=batch_size, say=said.append), said


@pytest.mark.parametrize("ending", ENDINGS)
def test_names_and_vectors(tmp_path: Path, ending: str) -> None:
    images = open_images(pictures(tmp_path / "photos", 40, classes=2, bad=(0, 7)))
    out = tmp_path / "new" / f"features{ending}"
    written, said = write(out, images)
    names, vectors = read(out)
    expected, kept = embed(tiny(), images, HOW, batch_size=8)
    assert (written.rows, written.width, written.resumed, said) == (38, 256, 0, [])
    assert names == [images.names[i] for i in kept]
    assert "class1/0001.png" in names
    assert vectors.dtype == np.float32
    assert np.array_equal(vectors, expected.numpy())
    assert {name for name, _ in written.bad} == {"class0/0000.png", "class1/0007.png"}
    assert list(out.parent.iterdir()) == [out]


def test_parquet_has_a_row_group_a_part(tmp_path: Path) -> None:
    write(tmp_path / "f.parquet", Numbered(100))
    file = pq.ParquetFile(tmp_path / "f.parquet")
    assert file.num_row_groups == 7
    assert file.metadata.num_rows == 97


@pytest.mark.parametrize("ending", ENDINGS)
def test_stopped_anywhere_and_run_again_gives_the_identical_file(tmp_path: Path, ending: str) -> None:
    whole, out = tmp_path / f"whole{ending}", tmp_path / f"out{ending}"
    write(whole, Numbered(100))
    stops, resumed = [3, 20, 21, 55, 99], []
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            write(out, Numbered(100, stop_at=stop))
        assert not out.exists()
    images = Numbered(100)
    written, said = write(out, images)
    assert out.read_bytes() == whole.read_bytes()
    assert not out.with_name(f"{out.name}.partial").exists()
    resumed.append(written.resumed)
    assert resumed[-1] == 96
    assert "96 of 100" in said[0]
    assert images.asked[-4:] == [96, 97, 98, 99]
    assert {name for name, _ in written.bad} == {"image 5", "image 42", "image 79"}  # known from earlier parts


def test_killed_while_the_finished_file_is_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "f.npz"
    monkeypatch.setattr(features, "_clear", lambda folder: None)  # as if killed just before
    write(out, Numbered(50))
    before = out.read_bytes()
    monkeypatch.undo()
    monkeypatch.setattr(features, "_PART", 16)
    images = Numbered(50)
    assert write(out, images)[0].resumed == 50
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


class Stuck(Numbered):
    def load(self, i: int, *, near: int | None = None) -> Tensor:
        if near and i >= 120:
            time.sleep(600)
        return super().load(i, near=near)


def write_until_stuck(out: Path) -> None:
    """In another process."""
    features._PART = 16
    features.write_features(out, embedder(), Stuck(200), batch_size=8)


@pytest.mark.heavy
def test_kill_9_then_the_same_again_gives_the_identical_file(tmp_path: Path) -> None:
    out, partial = tmp_path / "f.npz", tmp_path / "f.npz.partial"
    process = PROCESSES.Process(target=write_until_stuck, args=(out,))
    process.start()
    while process.is_alive() and len(list(partial.glob("*-*.npz"))) < 3:
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists()
    written, _ = write(out, Numbered(200))
    assert 48 <= written.resumed < 200
    write(tmp_path / "whole.npz", Numbered(200))
    assert out.read_bytes() == (tmp_path / "whole.npz").read_bytes()


def test_a_torn_part_is_made_again(tmp_path: Path) -> None:
    out = tmp_path / "f.npz"
    with pytest.raises(KeyboardInterrupt):
        write(out, Numbered(100, stop_at=90))
    parts = sorted((tmp_path / "f.npz.partial").glob("*-*.npz"))
    parts[2].write_bytes(parts[2].read_bytes()[:100])
    assert write(out, Numbered(100))[0].resumed == 64  # all others are kept
    write(tmp_path / "whole.npz", Numbered(100))
    assert out.read_bytes() == (tmp_path / "whole.npz").read_bytes()


def test_other_input_starts_over_and_says_what_differs(tmp_path: Path) -> None:
    out = tmp_path / "f.npz"
    other_model = tiny()
    with torch.no_grad():
        other_model.stem.conv.weight[0, 0, 0, 0] += 0.01
    other_size = Embedder("tiny", tiny(), features.dataclasses.replace(HOW, size=(40, 40)), 256)
    cases = {
        "model": (Numbered(100), Embedder("tiny", other_model, HOW, 256), 8),
        "model, preprocessing": (Numbered(100), other_size, 8),
        "images": (Numbered(99), embedder(), 8),
        "batch size": (Numbered(100), embedder(), 16),
    }
    for case, (images, model, batch_size) in cases.items():
        with pytest.raises(KeyboardInterrupt):
            write(out, Numbered(100, stop_at=90))
        foreign = tmp_path / "f.npz.partial" / "my notes.txt"
        foreign.write_text("keep")
        written, said = write(out, images, model, batch_size)
        assert written.resumed == 0, case
        assert f"other inputs ({case.partition(',')[0]})" in said[0]
        assert foreign.read_text() == "keep"
        foreign.unlink()
        foreign.parent.rmdir()  # nothing of ours is left in it


def test_other_pixels_under_the_same_names_are_embedded_again(tmp_path: Path) -> None:
    out = tmp_path / "f.npz"
    with pytest.raises(KeyboardInterrupt):
        write(out, Numbered(100, stop_at=90))
    written, said = write(out, Numbered(100, side=17))
    assert written.resumed == 0
    assert "80 are embedded again" in said[0]


def test_what_stood_there_stays_until_the_new_file_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "f.npz"
    out.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write(out, Numbered(100, stop_at=90))
    assert out.read_text() == "old"
    write(out, Numbered(100))
    assert len(read(out)[0]) == 97


def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    class Blank(Images):
        def __init__(self, count: int) -> None:
            super().__init__([str(i) for i in range(count)])

        def load(self, i: int, *, near: int | None = None) -> Tensor:
            return torch.zeros(3, 4, 4, dtype=torch.uint8)

    class Wide(torch.nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.mean((1, 2, 3))[:, None].repeat(1, 1000)

    monkeypatch.setattr(features, "_PART", 256)
    wide = Embedder("wide", Wide(), features.dataclasses.replace(HOW, size=(4, 4)), 1000)
    peaks = []
    for count in (1_000, 6_000):
        tracemalloc.start()
        write(tmp_path / "f.npz", Blank(count), wide, batch_size=128)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 3_000_000  # of names and file names; the vectors alone are 20 MB more


def test_bad_places_are_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = Numbered(20)
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "file").touch()
    for bad in ("f.csv", "f", "folder.npz", "file/f.npz"):
        with pytest.raises(FeaturesWriteError):
            write(tmp_path / bad, images)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"selfmask\[parquet\]"):
        write(tmp_path / "f.parquet", images)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = os.fsync, []

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) == 7:  # each file, and the folder after it
            raise OSError(28, "No space left on device")
        original(file)

    monkeypatch.setattr(os, "fsync", full)
    out = tmp_path / "f.npz"
    with pytest.raises(FeaturesWriteError, match="No space left"):
        write(out, Numbered(100))
    assert not list((tmp_path / "f.npz.partial").glob("*.tmp"))
    assert write(out, Numbered(100))[0].resumed == 32


def test_nothing_but_bad_images_is_an_error(tmp_path: Path) -> None:
    images = open_images(pictures(tmp_path / "photos", 3, bad=(0, 1, 2)))
    with pytest.raises(EvaluationError, match="none of the 3"):
        write(tmp_path / "f.npz", images)


def replace(file: Path, by: Path) -> None:
    """By another image, with the time of the old one."""
    before = file.stat()
    shutil.copyfile(by, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def stop() -> None:
    raise KeyboardInterrupt


def watched(monkeypatch: pytest.MonkeyPatch, photos: Path, at: int | None = None, do: Any = None) -> Any:
    """The images of a folder, with a note of which are decoded; at one of them, something is done first."""
    images, asked = open_images(photos), list[int]()
    load = type(images).load

    def noted(self: Any, i: int, *, near: int | None = None) -> Tensor:
        asked.append(i)
        if i == at and asked.count(i) == 1:
            do()
        return load(self, i, near=near)

    monkeypatch.setattr(type(images), "load", noted)
    return images, asked


def test_a_replaced_image_is_embedded_again_and_only_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos, out = pictures(tmp_path / "photos", 100), tmp_path / "f.npz"
    with monkeypatch.context() as patch:
        images, _ = watched(patch, photos, 90, stop)
        with pytest.raises(KeyboardInterrupt):
            write(out, images)
    replace(photos / "0020.png", photos / "0021.png")
    with monkeypatch.context() as patch:
        images, asked = watched(patch, photos)
        written, said = write(out, images)
    assert written.resumed == 64
    assert "16 are embedded again" in said[0]
    assert "64 of 100" in said[1]
    assert sorted(asked) == [*range(16, 32), *range(80, 100)]
    write(tmp_path / "whole.npz", open_images(photos))
    assert out.read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert np.array_equal(read(out)[1][20], read(out)[1][21])


def test_an_image_that_is_replaced_meanwhile_is_embedded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos, out = pictures(tmp_path / "photos", 60), tmp_path / "f.npz"
    with monkeypatch.context() as patch:
        images, asked = watched(patch, photos, 50, lambda: replace(photos / "0003.png", photos / "0004.png"))
        write(out, images)
    assert sorted(asked) == sorted([*range(60), *range(16)])
    write(tmp_path / "whole.npz", open_images(photos))
    assert out.read_bytes() == (tmp_path / "whole.npz").read_bytes()


def test_images_that_never_stay_the_same_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos, turn = pictures(tmp_path / "photos", 20), list[int]()
    images = open_images(photos)
    load = type(images).load

    def restless(self: Any, i: int, *, near: int | None = None) -> Tensor:
        if i == 7:
            turn.append(i)
            replace(photos / "0003.png", photos / f"{len(turn) % 2:04d}.png")
        return load(self, i, near=near)

    monkeypatch.setattr(type(images), "load", restless)
    with pytest.raises(ImagesChangedError, match="faster"):
        write(tmp_path / "f.npz", images)
    assert not (tmp_path / "f.npz").exists()


def test_two_at_once_the_second_is_refused_and_deletes_nothing(tmp_path: Path) -> None:
    out, partial = tmp_path / "f.npz", tmp_path / "f.npz.partial"
    process = PROCESSES.Process(target=write_until_stuck, args=(out,))
    process.start()
    while process.is_alive() and len(list(partial.glob("*-*.npz"))) < 3:
        time.sleep(0.01)
    before = {path.name for path in partial.iterdir()}
    for images, batch_size in ((Numbered(200), 8), (Numbered(20), 4)):  # the same work, and other work
        with pytest.raises(RunBusyError, match="another run is writing"):
            write(out, images, batch_size=batch_size)
    assert before <= {path.name for path in partial.iterdir()}
    assert process.is_alive()
    process.kill()
    process.join()
    assert write(out, Numbered(200))[0].resumed >= 48
    assert list(tmp_path.iterdir()) == [out]


def test_files_of_others_in_the_folder_of_parts_are_left(tmp_path: Path) -> None:
    partial = tmp_path / "f.npz.partial"
    partial.mkdir()
    for name in ("mine.tmp", ".mine.tmp", "all.0123abcd.tmp", "notes.json"):
        (partial / name).write_text("{}")
    write(tmp_path / "f.npz", Numbered(20))
    assert {path.name for path in partial.iterdir()} == {"mine.tmp", ".mine.tmp", "all.0123abcd.tmp", "notes.json"}


def test_a_clock_that_was_set_back_to_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives know no year before 1980, machines without a battery do."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    write(tmp_path / "f.npz", Numbered(20))
    monkeypatch.undo()
    monkeypatch.setattr(features, "_PART", 16)
    write(tmp_path / "g.npz", Numbered(20))
    assert (tmp_path / "f.npz").read_bytes() == (tmp_path / "g.npz").read_bytes()
