"""One opener for a path, bytes and a descriptor: a file is opened once, read once, and hashed once."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from selfmask import MaskedModel
from selfmask.errors import ConfigError, CorruptMaskFileError, MaskFileError, NotAMaskFileError, WrongBaseError
from selfmask.maskfile import MaskSource, OpenedMask, container, inspect_mask_file, open_container
from selfmask.maskfile.container import MAX_HEADER, container_bytes, content_hash
from tests.fuzzing import masks as fuzzed

from . import smn
from .tiny import Tiny, masked_with


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("opening") / "a.smn"
    masked_with(Tiny(), "dense").save_pretrained(path, head={"w": torch.ones(3), "n": torch.arange(3)}, notes="notes")
    return path


class Counted:
    """How often files are opened and content is hashed, and how many bytes of files are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opens = self.hashes = self.bytes = 0
        take = container._File.take
        monkeypatch.setattr(container, "_without_waiting", self.opened(container._without_waiting))
        monkeypatch.setattr(container, "content_hash", self.hashed(content_hash))

        def taken(file: Any, count: int) -> Any:
            self.bytes += count
            return take(file, count)

        monkeypatch.setattr(container._File, "take", taken)

    def opened(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            self.opens += 1
            return function(*args)

        return call

    def hashed(self, function: Callable[..., str]) -> Callable[..., str]:
        def call(*args: Any) -> str:
            self.hashes += 1
            return function(*args)

        return call


# ---- sources ---------------------------------------------------------------------------------------------------------


def sources(file: Path, stack: contextlib.ExitStack) -> dict[str, MaskSource]:
    data, opened = file.read_bytes(), stack.enter_context(file.open("rb"))
    opened.seek(0, os.SEEK_END)  # wherever it stands, it is read from the start
    return {
        "path": file,
        "text": str(file),
        "bytes": data,
        "bytearray": bytearray(data),
        "view": memoryview(data),
        "part": memoryview(b"xyz" + data + b"x")[3:-1],
        "descriptor": opened.fileno(),
        "container": open_container(file),
        "opened": OpenedMask(data),
        "checked": OpenedMask(file).checked(),
    }


def test_wherever_it_comes_from_it_is_the_same_mask(file: Path) -> None:
    with contextlib.ExitStack() as stack:
        masks = {}
        for name, source in sources(file, stack).items():
            masks[name] = MaskedModel.from_pretrained(Tiny(), source).pack()
        inspected = [inspect_mask_file(source) for source in sources(file, stack).values()]
    assert len({mask.sha256 for mask in masks.values()}) == 1
    for mask in masks.values():
        assert mask.notes == "notes"
        assert mask.head["w"].tolist() == [1, 1, 1]
        assert mask.head["n"].tolist() == [0, 1, 2]
        assert all(torch.equal(value, masks["path"].norm[name]) for name, value in mask.norm.items())
    assert all(each == inspected[0] for each in inspected)
    assert inspected[0][1]["file"] == file.stat().st_size


def test_a_descriptor_stays_open(file: Path) -> None:
    with file.open("rb") as opened:
        for _ in range(2):
            MaskedModel.from_pretrained(Tiny(), opened.fileno())
        assert os.fstat(opened.fileno())


@pytest.mark.parametrize("number", [-1, 10**6])
def test_descriptors_of_nothing(number: int) -> None:
    with pytest.raises(NotAMaskFileError, match="descriptor"):
        inspect_mask_file(number)


def test_a_pipe_that_nobody_writes_to_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotAMaskFileError, match="no ordinary file"):
        inspect_mask_file(tmp_path / "pipe")


def test_files_are_let_go(file: Path, tmp_path: Path) -> None:
    """Of files that are read, and of those that are refused at any stage."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    (tmp_path / "other.safetensors").write_bytes(safetensors.torch.save({"x": torch.zeros(1)}))
    (tmp_path / "cut.smn").write_bytes(file.read_bytes()[:-1])
    opened = OpenedMask(file).checked()
    for path in (tmp_path / "other.safetensors", tmp_path / "cut.smn", tmp_path, tmp_path / "none"):
        with pytest.raises(MaskFileError) as caught:  # the traceback would hold what is not closed
            inspect_mask_file(path)
        assert caught.value
    with pytest.raises(WrongBaseError):
        MaskedModel.from_pretrained(Tiny(1), file)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert opened.tensors


# ---- once ------------------------------------------------------------------------------------------------------------


def test_a_file_is_opened_read_and_hashed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    size = file.stat().st_size
    MaskedModel.from_pretrained(Tiny(), file)
    assert (counted.opens, counted.hashes, counted.bytes) == (1, 1, size)
    opened = OpenedMask(file)
    inspect_mask_file(opened)
    MaskedModel.from_pretrained(Tiny(), opened)
    MaskedModel(Tiny()).load_mask(opened, "again")
    assert (counted.opens, counted.hashes, counted.bytes) == (2, 2, 2 * size)


def test_only_the_header_is_read_of_a_mask_for_another_base(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    with pytest.raises(WrongBaseError):
        MaskedModel.from_pretrained(Tiny(1), file)
    assert counted.bytes == 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert counted.hashes == 0


def test_a_file_that_takes_its_name_does_not_take_its_place(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.smn"
    path.write_bytes(file.read_bytes())
    with OpenedMask(path) as opened:
        (tmp_path / "b").write_bytes(b"something else")
        (tmp_path / "b").replace(path)
        assert inspect_mask_file(opened)[0].notes == "notes"


@pytest.mark.parametrize("change", ["written over", "cut"])
def test_a_file_that_changes_before_it_is_read_is_refused(file: Path, tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.smn"
    path.write_bytes(file.read_bytes())
    with OpenedMask(path) as opened:
        if change == "cut":
            os.truncate(path, path.stat().st_size - 1)
        else:
            data = file.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CorruptMaskFileError):
            MaskedModel.from_pretrained(Tiny(), opened)


def test_a_file_that_changes_after_it_was_read_changes_nothing(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.smn"
    path.write_bytes(file.read_bytes())
    opened = OpenedMask(path).checked()
    path.write_bytes(bytes(path.stat().st_size))
    assert MaskedModel.from_pretrained(Tiny(), opened).pack().notes == "notes"


def test_bytes_of_the_caller_can_be_used_again(file: Path) -> None:
    data = bytearray(file.read_bytes())
    masked = MaskedModel.from_pretrained(Tiny(), data)
    before = {name: value.clone() for name, value in masked.pack().norm.items()}
    data[:] = bytes(len(data))
    assert all(torch.equal(value, before[name]) for name, value in masked.pack().norm.items())


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_bytes_without_a_file(tmp_path: Path) -> None:
    masked, other = masked_with(Tiny(), "dense"), masked_with(Tiny(), "large")
    head = {"w": torch.ones(3)}
    masked.save_pretrained(tmp_path / "a.smn", head=head, notes="x")
    assert masked.mask_bytes(head=head, notes="x") == (tmp_path / "a.smn").read_bytes()
    relative = other.mask_bytes(relative_to=masked.mask_bytes())
    loaded = MaskedModel(Tiny())
    loaded.load_mask(masked.mask_bytes(), "reference")
    loaded.load_mask(relative, "other")
    loaded.set_mask("other")
    assert loaded.pack().sha256 == other.pack().sha256


TYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def test_what_is_written_is_what_safetensors_would_write() -> None:
    """Byte for byte, but for the order of the header: safetensors has none."""
    tensors = {f"{name}.{dtype}": torch.ones(3, 2).to(dtype) for dtype in TYPES for name in ("b", "a", "ä")}
    tensors |= {"none": torch.zeros(0, 4), "number": torch.tensor(2.5)}
    metadata = {"words": "ä", "more": "\u2028"}
    ours, theirs = container_bytes(tensors, metadata), safetensors.torch.save(tensors, metadata)
    (header, body), (their_header, their_body) = split(ours), split(theirs)
    assert header == their_header
    assert body == their_body
    again = open_container(ours).read()
    assert again.keys() == tensors.keys()
    for name, value in tensors.items():
        assert (again[name].dtype, again[name].shape) == (value.dtype, value.shape)
        assert torch.equal(again[name], value)
    assert container_bytes(dict(reversed(tensors.items())), dict(reversed(metadata.items()))) == ours


def split(data: bytes) -> tuple[Any, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def test_what_no_reader_would_read_is_not_written() -> None:
    with pytest.raises(ConfigError, match="type"):
        container_bytes({"x": torch.zeros(1, dtype=torch.complex64)}, {})


def test_the_hash_covers_words_and_tensors() -> None:
    tensors = {"x": torch.arange(3)}
    data = container_bytes(tensors, {"words": "a"}, hashed="a")
    assert open_container(data).read("a")["x"].tolist() == [0, 1, 2]
    for altered, words in ((data, "b"), (data[:-1] + b"\1", "a")):
        with pytest.raises(CorruptMaskFileError, match="altered"):
            open_container(altered).read(words)
    with pytest.raises(CorruptMaskFileError, match="altered"):  # a file without a hash
        open_container(container_bytes(tensors, {})).read("")
    opened = open_container(data)
    opened.read()
    with pytest.raises(ValueError, match="already"):
        opened.read()


# ---- headers ---------------------------------------------------------------------------------------------------------

ENTRY = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}


@pytest.mark.parametrize(
    "header",
    [
        '{"x": %s, "x": %s}',
        '{"x": {"dtype": "U8", "dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        ' {"x": %s}',
        '["x", %s]',
        '{"\\ud800": %s}',
        '{"__metadata__": {"a": "\\udfff"}, "x": %s}',
        '{"__metadata__": null, "x": %s}',
        '{"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "more": 1}}',
        '{"x": {"dtype": "U8", "shape": [1]}}',
        '{"x": {"dtype": "U8", "shape": [true], "data_offsets": [0, 1]}}',
        '{"x": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}',
        '{"x": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}}',
        '{"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}',
        '{"x": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}',
        '{"x": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}}',
        '{"x": {"dtype": "U8", "shape": [%s1], "data_offsets": [0, 1]}}' % ("1," * 70),
        '{"x": {"dtype": "U8", "shape": [%s1], "data_offsets": [0, 1]}}' % ("9223372036854775807," * 100_000),
        '{"x": {"dtype": "U8", "shape": [0, 4611686018427387904, 8], "data_offsets": [0, 0]}, "y": %s}',
        '{"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "y": null}',
        "{}",
        "[" * 100_000,
        '{"x": ' * 100_000,
        "1" * 5000,
    ],
)
def test_headers_that_are_none(header: str) -> None:
    text = header.replace("%s", json.dumps(ENTRY))
    data = len(text.encode()).to_bytes(8, "little") + text.encode() + b"\0"
    with pytest.raises(CorruptMaskFileError) as caught:
        open_container(data)
    assert all(part in str(caught.value) for part in ("expected:", "found:", "do:"))
    assert len(str(caught.value)) < 1000


def test_a_header_that_is_too_long() -> None:
    text = json.dumps({"x": ENTRY}).encode().ljust(MAX_HEADER + 1)
    with pytest.raises(CorruptMaskFileError, match="header"):
        open_container(len(text).to_bytes(8, "little") + text + b"\0")
    assert open_container((len(text) - 1).to_bytes(8, "little") + text[:-1] + b"\0").table.keys() == {"x"}


def test_numbers_may_begin_anywhere() -> None:
    """Our files have them in order; others need not."""
    parts = {
        "a": ("U8", [3], b"abc"),
        "none": ("I64", [0, 2], b""),
        "b": ("F64", [2], np.array([0.5, 2.0]).tobytes()),
        "c": ("F32", [], bytes(4)),
    }
    tensors = open_container(smn.assemble({}, parts)).read()
    assert (tensors["none"].dtype, tensors["none"].shape) == (torch.int64, (0, 2))
    assert tensors["b"].tolist() == [0.5, 2.0]
    assert tensors["c"].shape == ()
    assert all(value.data_ptr() % value.dtype.itemsize == 0 for value in tensors.values())


@pytest.mark.parametrize("kind", ["flips", "lengths", "headers", "tables"])
def test_whatever_opens_is_a_safetensors_file(kind: str, tmp_path: Path) -> None:
    """The library is the second opinion: what we take, it takes, and finds the same in it."""
    taken = 0
    for number in range(300):
        data = fuzzed.MUTATIONS[kind][0](random.Random(f"opinion/{kind}/{number}"))[0]
        try:
            opened = open_container(data)
        except MaskFileError:
            continue
        (tmp_path / "a").write_bytes(data)
        with safetensors.safe_open(tmp_path / "a", "pt") as theirs:
            assert (theirs.metadata() or {}) == opened.metadata
            assert sorted(theirs.keys()) == sorted(opened.table)
            for name, value in opened.read().items():
                other = theirs.get_tensor(name)
                assert (other.dtype, other.shape) == (value.dtype, value.shape)
                assert content_hash("", {"x": other}) == content_hash("", {"x": value})
        taken += 1
    assert taken or kind == "lengths"
