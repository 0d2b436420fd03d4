"""Parquet files with a column of images, each as the bytes of its file."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from .. import checked
from ..errors import BadImageError, DataUnavailableError, MalformedDataError, MissingExtraError, SelfmaskError
from .names import Names
from .places import Place
from .recent import Recent
from .records import RecordImages

_GROUPS: Recent[Any] = Recent(512 << 20, lambda column: int(column.nbytes))
_NAMES = ("name", "path", "file_name", "filename", "file", "key", "__key__", "image_path", "id")
_LABELS = ("label", "labels", "cls", "class", "target", "fine_label")
_PEEKED = 16  # images of the first rows that tell a column of images from other bytes
# How the files of images begin: JPEG, PNG, GIF, BMP, TIFF twice. (WebP, AVIF and HEIC are told by later bytes.)
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*")


class ParquetImages(RecordImages):
    """The rows of some parquet files, one after the other; a row group is read as a whole."""

    def __init__(self, shards: Sequence[Place], column: str | None) -> None:
        files = [_opened(shard) for shard in shards]
        self.column = _column(shards[0], files[0], column)
        for shard, file in zip(shards, files, strict=True):
            if self.column not in _candidates(file):
                raise _no_images(shard, file, self.column)
        names = _names(files, self.column)
        super().__init__(shards, names or _numbers(files), *_labels(files))
        self.undivided, self.own_names = True, names is not None
        groups = [
            (number, group, file.metadata.row_group(group).num_rows)
            for number, file in enumerate(files)
            for group in range(file.num_row_groups)
        ]
        self._groups = [(number, group) for number, group, _ in groups]
        self._starts = [0, *accumulate(rows for _, _, rows in groups)]

    def shard(self, i: int) -> int:
        return self._groups[bisect_right(self._starts, i) - 1][0]

    def record(self, i: int) -> bytes:
        place = bisect_right(self._starts, i) - 1
        shard, group = self._groups[place]
        key = (self.shards[shard].name, self._stamps[shard], group, self.column)
        column = _GROUPS.get(key, lambda: self._group(shard, group))
        value = column[i - self._starts[place]].as_py()
        if not isinstance(value, bytes):
            raise BadImageError(f"cannot read {self.names[i]}", found="there is no image in this row")
        return value

    def _group(self, shard: int, group: int) -> Any:
        place = self.shards[shard]
        try:
            table = _opened(place).read_row_group(group, columns=[self.column])
        except SelfmaskError:
            raise
        except Exception as error:  # pyarrow raises several kinds on damaged files
            raise DataUnavailableError(
                f"cannot read row group {group} of {place.name}", found=error, todo="get the file again"
            ) from error
        column = table.column(0)
        return column.combine_chunks() if not self.column.endswith(".bytes") else column.combine_chunks().field("bytes")


def open_parquet(shards: Sequence[Place], column: str | None) -> ParquetImages:
    return ParquetImages(shards, column)


def _opened(place: Place) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtraError(
            f"cannot read {place.name}: pyarrow is not installed", todo="pip install 'selfmask[parquet]'"
        ) from None
    try:
        return pq.ParquetFile(place.open(), pre_buffer=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, SelfmaskError):
            raise
        raise MalformedDataError(
            f"{place.name} is no whole parquet file", found=" ".join(str(error).split())[:300], todo="get it again"
        ) from error


def _candidates(file: Any) -> list[str]:
    """Columns of bytes, also those that Hugging Face writes: of structures with `bytes` and `path`."""
    import pyarrow as pa

    found = []
    for field in file.schema_arrow:
        kind = field.type
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            field, kind = field.with_name(f"{field.name}.bytes"), kind.field("bytes").type
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            found.append(field.name)
    return found


def _column(shard: Place, file: Any, asked: str | None) -> str:
    """The column that has the images: the one that is asked for, or the only one that can be meant."""
    candidates = _candidates(file)
    if asked is not None:
        for name in (asked, f"{asked}.bytes"):
            if name in candidates:
                return name
        raise _no_images(shard, file, asked)
    likely = [name for name in candidates if _holds_images(file, name)]
    if len(likely) != 1:
        raise (
            _no_images(shard, file, None)
            if not likely
            else MalformedDataError(
                f"{shard.name} has several columns of images",
                expected="one of them",
                found=", ".join(likely),
                todo=f"name it behind the file: {shard.name}#{likely[0].removesuffix('.bytes')}",
            )
        )
    return likely[0]


def _no_images(shard: Place, file: Any, column: str | None) -> MalformedDataError:
    return MalformedDataError(
        f"{shard.name} has no column of images" if column is None else f"{shard.name}: {column} holds no images",
        expected="a column with the bytes of an image file in each row",
        found=", ".join(f"{field.name} ({field.type})" for field in file.schema_arrow)[:500],
    )


def _holds_images(file: Any, name: str) -> bool:
    """By how the bytes in the first rows begin; broken ones may be among them."""
    if not file.metadata.num_rows:
        return False
    batch = next(file.iter_batches(_PEEKED, columns=[name]))
    column = batch.column(0).field("bytes") if name.endswith(".bytes") else batch.column(0)
    heads = [value[:12] for value in column.to_pylist() if value]
    return any(_begins_as_image(head) for head in heads)


def _begins_as_image(head: bytes) -> bool:
    known = head.startswith(_BEGINNINGS) or head[8:12] == b"WEBP" or head[4:8] == b"ftyp"
    return known or (head[:1] == b"P" and head[1:2] in b"1234567" and head[2:3].isspace())


def _names(files: Sequence[Any], column: str) -> Names | None:
    """What the rows call their images, if each has another name."""
    import pyarrow as pa

    schema = files[0].schema_arrow
    own = [f"{column.removesuffix('.bytes')}.path"] if column.endswith(".bytes") else []
    texts = [field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)]
    for name in [*(each for each in _NAMES if each in texts), *own]:
        found = [value for file in files for value in _values(file, name)]
        if all(isinstance(value, str) for value in found) and len(set(found)) == len(found):
            return Names(value.encode("utf-8", "backslashreplace") for value in found)
    return None


def _numbers(files: Sequence[Any]) -> Names:
    return Names(f"{i:06d}".encode() for i in range(sum(file.metadata.num_rows for file in files)))


def _values(file: Any, name: str) -> list[Any]:
    top, _, inner = name.partition(".")
    column = file.read(columns=[name]).column(0).combine_chunks()
    return list((column.field(inner) if inner and top else column).to_pylist())


def _labels(files: Sequence[Any]) -> tuple[list[int] | None, list[str] | None]:
    """Whole numbers in a column that is called as labels are; what they mean, if Hugging Face wrote it down."""
    import pyarrow as pa

    schema = files[0].schema_arrow
    whole = [field.name for field in schema if pa.types.is_integer(field.type)]
    for name in (each for each in _LABELS if each in whole):
        values = [value for file in files for value in _values(file, name)]
        if all(isinstance(value, int) for value in values):
            return values, _class_names(schema, name, max(values, default=-1), min(values, default=0))
    return None, None


def _class_names(schema: Any, column: str, most: int, least: int) -> list[str] | None:
    try:
        notes = checked.mapping(checked.document((schema.metadata or {})[b"huggingface"]))
        names = notes["info"]["features"][column]["names"]
        classes = list(checked.items(names, checked.text, most=1_000_000))
    except (KeyError, TypeError, ValueError, json.JSONDecodeError):
        return None
    return classes if least >= 0 and most < len(classes) else None
