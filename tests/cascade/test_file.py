"""Cascade files: read once, into memory, by the opener of mask files; nothing else is written on the way."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from selfmask import Cascade
from selfmask.cascade.file import FORMAT, inspect_cascade, is_cascade, open_cascade
from selfmask.errors import CorruptCascadeError, MaskFileError, NotAMaskFileError
from selfmask.maskfile import open_container
from selfmask.maskfile.container import container_bytes
from selfmask.maskfile.manifest import hashed_words
from tests.maskfile.test_opening import Counted
from tests.training.small import network

from .small import EXPERTS, clothes, fitted, pixels


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> Cascade:
    return fitted(tmp_path_factory.mktemp("masks"))


@pytest.fixture
def file(cascade: Cascade, tmp_path: Path) -> Path:
    cascade.save(tmp_path / "cascade.smn")
    return tmp_path / "cascade.smn"


def test_no_temporary_files(cascade: Cascade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a temporary file")

    for name in ("mkdtemp", "mkstemp", "TemporaryDirectory", "TemporaryFile", "NamedTemporaryFile"):
        monkeypatch.setattr(tempfile, name, refuse)
    cascade.save(tmp_path / "a.smn")
    Cascade.load(network().eval(), tmp_path / "a.smn")
    inspect_cascade(tmp_path / "a.smn")
    assert [path.name for path in tmp_path.iterdir()] == ["a.smn"]


def test_a_loaded_cascade_has_no_need_of_its_file(cascade: Cascade, file: Path, tmp_path: Path) -> None:
    """`cp` writes into the file that is there: whoever had mapped it would see other weights from then on."""
    loaded, images = Cascade.load(network().eval(), file), pixels(20)
    opened = open_cascade(file)
    with torch.no_grad():
        before = loaded(images)
    other = tmp_path / "other.smn"
    other.write_bytes(bytes(file.stat().st_size))
    subprocess.run(["cp", other, file], check=True)
    with torch.no_grad():
        assert torch.equal(loaded(images), before)
        assert torch.equal(Cascade.load(network().eval(), opened)(images), before)  # nor has one that was only opened
    file.unlink()
    with torch.no_grad():
        assert torch.equal(loaded(images), before)


def test_a_file_is_opened_and_read_once_and_each_part_hashed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    opened = open_cascade(file)
    opened.about()
    Cascade.load(network().eval(), opened)
    assert (counted.opens, counted.bytes) == (1, file.stat().st_size)
    assert counted.hashes == 1 + 1 + EXPERTS  # the file, and every mask in it


def test_a_live_cascade_does_not_change_with_its_file(file: Path) -> None:
    """As a copy over it would; with a file that stays mapped, the vectors would be others, or the process end."""
    loaded = Cascade.load(network().eval(), file)
    before, route = loaded.embed(clothes(20)), loaded.route(clothes(20))
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.write(b"\xff" * size)
    assert torch.equal(loaded.embed(clothes(20)), before)
    os.truncate(file, 0)
    for mask in loaded.masked.mask_names:
        loaded.masked.set_mask(mask)
    assert torch.equal(loaded.embed(clothes(20)), before)
    assert torch.equal(loaded.route(clothes(20)), route)


def test_what_was_opened_does_not_change_with_its_file(cascade: Cascade, file: Path) -> None:
    opened = open_cascade(file)
    file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(Cascade.load(network().eval(), opened).embed(clothes(9)), cascade.embed(clothes(9)))


def test_bytes_and_descriptors(cascade: Cascade, file: Path) -> None:
    vectors = cascade.embed(clothes(9))
    data = file.read_bytes()
    with file.open("rb") as opened:
        for source in (data, memoryview(data), opened.fileno(), str(file)):
            assert is_cascade(source)
            assert torch.equal(Cascade.load(network().eval(), source).embed(clothes(9)), vectors)
            assert inspect_cascade(source).parts["file"] == len(data)


def test_a_mask_is_no_cascade(file: Path) -> None:
    with open_container(file) as opened:
        mask = opened.read()["dispatcher"].numpy().tobytes()
    assert not is_cascade(mask)
    with pytest.raises(NotAMaskFileError):
        Cascade.load(network(), mask)


def test_the_checks_of_mask_files_hold_for_cascades(file: Path, tmp_path: Path) -> None:
    """Pipes, folders, keys that stand twice, and types that no cascade has: refused before anything is read."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none", "a\0b"):
        assert not is_cascade(path)
        with pytest.raises(NotAMaskFileError):
            open_cascade(path)
    data = file.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    twice = data[8:end].rstrip()[:-1] + b',"dispatcher":' + json.dumps(header["dispatcher"]).encode() + b"}"
    with pytest.raises(MaskFileError):
        open_cascade(struct.pack("<Q", len(twice)) + twice + data[end:])
    tensors, metadata = open_container(data).read(), header["__metadata__"]
    del metadata["sha256"]
    for name, value in {
        "router.mean": tensors["router.mean"].double(),
        "expert.0": tensors["expert.0"].to(torch.int8),
        "expert.1": tensors["expert.1"][None],
    }.items():
        with pytest.raises(CorruptCascadeError):
            open_cascade(
                container_bytes({**tensors, name: value}, metadata, hashed=hashed_words(FORMAT, "2", metadata["about"]))
            )


def test_what_is_wrong_with_a_mask_names_the_cascade_and_the_mask(file: Path, tmp_path: Path) -> None:
    with open_container(file) as opened:
        tensors, metadata = opened.read(), opened.metadata
    del metadata["sha256"]
    tensors["expert.1"][-1] ^= 1  # within the mask file, under a hash of the whole that is right
    (tmp_path / "b.smn").write_bytes(
        container_bytes(tensors, metadata, hashed=hashed_words(FORMAT, "2", metadata["about"]))
    )
    for read in (inspect_cascade, lambda path: Cascade.load(network().eval(), path)):
        with pytest.raises(CorruptCascadeError, match=r"expert 1 in .*b\.smn"):
            read(tmp_path / "b.smn")
