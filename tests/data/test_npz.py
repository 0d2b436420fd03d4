"""Array files of others: what would fill the memory is refused by its header."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from selfmask import memory
from selfmask.data.named import open_arrays
from selfmask.errors import MalformedDataError

GOOD = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def header(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def packed(path: Path, method: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def lying(path: Path, content: bytes, size: int) -> Path:
    """An archive whose list of members claims a size that the member does not have."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train_images.npy", content)
        archive.filelist[0].file_size = size
    return path


BOMBS: dict[str, Any] = {
    "more than there is, the archive agreeing": lambda path: lying(
        path, header((1 << 24, 256, 256)), len(header((1 << 24, 256, 256))) + (1 << 40)
    ),
    "a real bomb": lambda path: packed(path, train_images=header((64, 1024, 1024)) + bytes(64 << 20)),
    "more than the header says": lambda path: packed(path, train_images=header((1, 2, 3)) + bytes(64 << 20)),
    "less than the header says": lambda path: packed(path, train_images=header((1 << 24, 256, 256)) + bytes(9)),
    "less than nothing": lambda path: packed(path, train_images=header((-1, 8, -8)) + bytes(64)),
    "another codec": lambda path: packed(
        path, zipfile.ZIP_BZIP2, train_images=header((64, 1024, 1024)) + bytes(64 << 20)
    ),
    "names without letters": lambda path: packed(
        path, train_images=header((1, 2, 3)) + bytes(6), classes=header((10**12,), "<U0")
    ),
    "many names": lambda path: packed(
        path, train_images=header((1, 2, 3)) + bytes(6), classes=header((1 << 20,), "<U1") + bytes(4 << 20)
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_not_unpacked(bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_left_to_groups", lambda _: [32 << 20])
    path = BOMBS[bomb](tmp_path / "x.npz")
    assert path.stat().st_size < 80_000
    tracemalloc.start()
    try:
        with pytest.raises(MalformedDataError) as caught:
            open_arrays(path, "train")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_what_fits_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_left_to_groups", lambda _: [32 << 20])
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", train_images=GOOD, train_labels=np.array([1, 0]), classes=np.array(["a", "bcd"]))
        images = open_arrays(tmp_path / "x.npz", "train")
        assert np.array_equal(images.pixels, GOOD)
        assert (images.labels, images.classes) == ([1, 0], ["a", "bcd"])
    large = np.zeros((20, 1024, 1024), np.uint8)
    np.savez_compressed(tmp_path / "x.npz", train_images=large)
    assert np.array_equal(open_arrays(tmp_path / "x.npz", "train").pixels, large)
