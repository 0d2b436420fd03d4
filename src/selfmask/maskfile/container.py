"""Safetensors files, opened once: from a path, a descriptor or bytes, and made of tensors and words.

All our files are such containers. They are read and written here, and not by the library of that name, because it maps
files by their name (who opens one twice may get two, and what is mapped changes when the file is written over) and
writes its metadata in random order. Here a file is opened once, its header is checked before anything else is read, and
its data is read into memory of our own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import stat
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import checked
from ..errors import ConfigError, CorruptMaskFileError, NotAMaskFileError
from .fingerprint import as_bytes

PathLike = str | os.PathLike[str]
Data = bytes | bytearray | memoryview
Source = PathLike | Data | int
"""A path, the bytes of a file, or the descriptor of an open one (which stays open, and is read from its start)."""

MAX_HEADER = 8 << 20  # a mask of 10,000 tensors needs about 2 MB; the safetensors limit of 100 MB is generous
MAX_TENSORS = 30_000
"""In a file: masks, and twice as many statistics."""
_MAX_RANK = 64  # as many dimensions as a tensor of PyTorch can have
_TYPES = {  # in the order in which safetensors puts their tensors: none then begins at an odd place
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
WIDTHS = {name: dtype.itemsize for name, dtype in _TYPES.items()}
"""The types that our files hold, and the bytes of a number of each."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a file as the header describes it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


class Container:
    """A file whose header was read and found sound. `read` reads the rest, once, and lets go of the file."""

    def __init__(self, name: str, source: _Bytes | _File) -> None:
        self.name, self.size = name, source.size
        self._source = source
        header = int.from_bytes(source.take(min(8, self.size)).numpy(), "little")
        if self.size < 8 or header > self.size - 8:
            raise NotAMaskFileError(
                f"{name} is not a safetensors file, or is truncated",
                expected=f"a header of {header} bytes",
                found=f"{self.size} bytes in total",
                todo="give a .smn file; if this is one, download it again",
            )
        if header > MAX_HEADER:
            raise CorruptMaskFileError(
                f"the header of {name} is too large", expected=f"at most {MAX_HEADER} bytes", found=header
            )
        text = source.take(header).numpy().tobytes()
        try:
            self.metadata, entries = _parsed(text)
            self.table = _table(entries, self.size - 8 - header)
        except ValueError as error:
            raise CorruptMaskFileError(
                f"{name} is damaged", expected="a valid safetensors file", found=str(error)[:200] or repr(error)
            ) from error

    def read(self, hashed: str | None = None) -> dict[str, Tensor]:
        """All tensors, each in memory of its own. Only once: whoever needs them twice keeps them.

        `hashed` are the words that the file's "sha256" covers besides the tensors: what does not match it is refused.
        None for files that carry no hash.
        """
        with self:
            tensors = {key: _tensor(self._source, stored) for key, stored in self.table.items()}
        if hashed is not None:
            expected, found = str(self.metadata.get("sha256")), content_hash(hashed, tensors)
            if found != expected:
                raise CorruptMaskFileError(
                    f"the content of {self.name} has been altered",
                    expected=f"SHA-256 {expected[:16]}",
                    found=found[:16],
                )
        return tensors

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_container(source: Source | Container, name: str | None = None) -> Container:
    """Open a file and check its header; one that is open already is handed back. `name` is what errors call it."""
    if isinstance(source, Container):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return Container(name or "the mask file", _Bytes(source))
    name = name or (f"descriptor {source}" if isinstance(source, int) else os.fspath(source))
    file = _File(source, name)
    try:
        return Container(name, file)
    except BaseException:
        file.close()
        raise


def container_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], hashed: str | None = None) -> bytes:
    """The bytes of a file: the same for the same content. `hashed` is as in `Container.read`."""
    if odd := {str(tensor.dtype) for tensor in tensors.values()} - {str(dtype) for dtype in _NAMES}:
        raise ConfigError(
            "the file format does not support tensors of this type", expected=list(WIDTHS), found=sorted(odd)
        )
    if long := [name for name in tensors if len(name) > checked.MAX_NAME]:
        raise ConfigError(
            "the name of a tensor is too long", expected=f"at most {checked.MAX_NAME} characters", found=long[0][:100]
        )
    words = dict(metadata) if hashed is None else {**metadata, "sha256": content_hash(hashed, tensors)}
    fields: dict[str, Any] = {"__metadata__": words} if words else {}
    order, at = list(_TYPES), 0
    names = sorted(tensors, key=lambda name: (order.index(_NAMES[tensors[name].dtype]), name))
    for name in names:
        stored = Stored(_NAMES[tensors[name].dtype], tuple(tensors[name].shape))
        offsets = [at, at := at + stored.nbytes]
        fields[name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": offsets}
    header = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, *(as_bytes(tensors[name]) for name in names)])


def content_hash(words: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of some words, and of each tensor in the order of names: name, type, shape, bytes."""
    total = hashlib.sha256(words.encode() + b"\0")
    for name in sorted(tensors):
        tensor = tensors[name]
        kind = str(tensor.dtype).removeprefix("torch.")
        total.update(json.dumps([name, kind, list(tensor.shape)]).encode() + b"\0")
        total.update(as_bytes(tensor))
    return total.hexdigest()


# ---- sources --------------------------------------------------------------------------------------------------------


class _Bytes:
    """Bytes, taken piece by piece."""

    def __init__(self, data: Data) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.size, self._at = self._data.size, 0

    def take(self, count: int) -> Tensor:
        """The next bytes, copied: nobody else writes to them."""
        if count > self.size - self._at:
            raise ValueError("these bytes have already been read")
        part = torch.empty(count, dtype=torch.uint8)
        part.numpy()[:] = self._data[self._at : self._at + count]
        self._at += count
        return part

    def close(self) -> None:
        self._at = self.size


class _File:
    """An open file, read from its start to its end."""

    def __init__(self, file: PathLike | int, name: str) -> None:
        self._name = name
        try:
            # A pipe is opened without waiting for who writes to it: it is refused just below.
            self._file = io.FileIO(file, closefd=not isinstance(file, int), opener=_without_waiting)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise self._unreadable(getattr(error, "strerror", None) or error) from error
        try:
            about = os.fstat(self._file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise self._unreadable("no ordinary file")
            if isinstance(file, int):
                self._file.seek(0)
        except OSError as error:
            self.close()
            raise self._unreadable(error.strerror or error) from error
        except NotAMaskFileError:
            self.close()
            raise
        self.size = about.st_size

    def take(self, count: int) -> Tensor:
        """The next bytes, read into memory that is asked for once."""
        part, done = torch.empty(count, dtype=torch.uint8), 0
        while done < count:
            try:
                read = self._file.readinto(part[done:].numpy().data)
            except OSError as error:
                raise self._unreadable(error.strerror or error) from error
            if not read:
                raise CorruptMaskFileError(
                    f"{self._name} became shorter while being read", expected=f"{count} bytes", found=done
                )
            done += read
        return part

    def close(self) -> None:
        self._file.close()

    def _unreadable(self, found: object) -> NotAMaskFileError:
        return NotAMaskFileError(
            f"cannot read {self._name}", expected="a .smn file", found=found, todo="check the path"
        )


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


# ---- headers --------------------------------------------------------------------------------------------------------


def _parsed(header: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """The metadata, text to text, and the entries of the tensors, which may be anything yet."""
    if not header.startswith(b"{"):
        raise ValueError("the header is not an object")
    fields: dict[str, Any] = checked.mapping(checked.document(header, most=MAX_HEADER), most=MAX_TENSORS + 1)
    metadata = checked.mapping(fields.pop("__metadata__", {}))
    return {key: checked.text(value, most=MAX_HEADER) for key, value in metadata.items()}, fields


def _table(entries: Mapping[str, Any], size: int) -> dict[str, Stored]:
    """The tensors in the order in which they lie in the file: side by side they fill it, none lies on another."""
    places: list[tuple[int, int, str, Stored]] = []
    for key, fields in entries.items():
        if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"the entry {key[:100]!r} does not describe a tensor")
        dtype = checked.one_of(fields["dtype"], WIDTHS)
        shape = checked.items(fields["shape"], checked.count, most=_MAX_RANK)
        begin, end = checked.items(fields["data_offsets"], checked.count, most=2)
        if math.prod(max(side, 1) for side in shape) >= 1 << 60:  # though it may be empty
            raise ValueError(f"the shape of {key[:100]!r} is too large")
        stored = Stored(dtype, shape)
        if end - begin != stored.nbytes:
            raise ValueError(f"{key[:100]!r} has {end - begin} bytes instead of {stored.nbytes}")
        places.append((begin, end, key, stored))
    places.sort(key=lambda place: place[:3])
    at = 0
    for begin, end, _, _ in places:
        if begin != at:
            raise ValueError(f"{'two tensors share' if begin < at else 'no tensor uses'} the bytes at {min(begin, at)}")
        at = end
    if at != size:
        raise ValueError(f"tensors of {at} bytes in a file with {size} bytes for them")
    return {key: stored for _, _, key, stored in places}


def _tensor(source: _Bytes | _File, stored: Stored) -> Tensor:
    if not stored.nbytes:
        return torch.empty(stored.shape, dtype=_TYPES[stored.dtype])
    return source.take(stored.nbytes).view(_TYPES[stored.dtype]).view(stored.shape)
