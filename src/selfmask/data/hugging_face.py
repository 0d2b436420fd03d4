"""Data sets of Hugging Face's `datasets`: saved folders, and objects, whether they have a length or only come by."""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import BadImageError, DataUnavailableError, MalformedDataError, MissingExtraError
from .folders import SPLITS
from .images import printable
from .names import Names
from .places import LocalFile, Place
from .records import RecordImages
from .tars import TarImages, open_tars

_MODULES = ("datasets.arrow_dataset", "datasets.iterable_dataset")
_SAVED = ("state.json", "dataset_info.json")
_SAVED_SPLITS = "dataset_dict.json"
_LARGEST = 1 << 30  # bytes of one image
_ROOM = 0.5  # share of the free disk that a stream may take


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` has written it."""
    return (folder / _SAVED_SPLITS).is_file() or all((folder / name).is_file() for name in _SAVED)


def open_saved(folder: Path, split: str) -> RecordImages:
    datasets = _package(printable(folder))
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # the package raises many kinds
        raise MalformedDataError(f"cannot open the data set {printable(folder)}", found=error) from error
    if not isinstance(found, dict):
        return _undivided(HuggingFaceImages(found))
    if "train" not in found or len(found) == 1:
        return _undivided(HuggingFaceImages(next(iter(found.values()))))
    also = {"test": ("validation",), "val": ("validation", "test")}.get(split, ())
    chosen = next((name for name in (*SPLITS[split], *also) if name in found), "train")
    return HuggingFaceImages(found[chosen])


def _undivided(images: HuggingFaceImages) -> HuggingFaceImages:
    images.undivided = True
    return images


def is_dataset(where: object) -> bool:
    """Without importing the package, which takes seconds."""
    return any(each.__module__ in _MODULES for each in type(where).__mro__)


def open_dataset(dataset: Any) -> RecordImages:
    return HuggingFaceImages(dataset) if hasattr(dataset, "__len__") else _written_down(dataset)


class HuggingFaceImages(RecordImages):
    """A data set with a length. Images are taken as the bytes they were saved as, not as the package decodes them."""

    def __init__(self, dataset: Any) -> None:
        self.column = _image_column(dataset.features)
        super().__init__([_Files(dataset)], _numbers(len(dataset)), *_labels(dataset))
        self.dataset = _encoded(dataset, self.column).select_columns([self.column]).with_format(None)

    def shard(self, i: int) -> int:
        return 0

    def record(self, i: int) -> bytes:
        try:
            return _bytes(self.dataset[i][self.column])
        except Exception as error:  # whatever the data set raises, it is this image that cannot be had
            raise BadImageError(
                f"cannot read image {self.names[i]}", found=f"{type(error).__name__}: {error}"
            ) from error


class _Files(Place):
    """The files that a data set lies in."""

    def __init__(self, dataset: Any) -> None:
        self._places = [LocalFile(file["filename"]) for file in dataset.cache_files]
        self.name = self._places[0].name if self._places else "a data set in memory"

    def size(self) -> int:
        return sum(place.size() for place in self._places)

    def stamp(self) -> str:
        return "; ".join(place.stamp() for place in self._places)

    def read(self, start: int, stop: int) -> bytes:
        raise NotImplementedError  # the data set reads them


def _written_down(dataset: Iterable[Any]) -> TarImages:
    """What only comes by, as a tar on the disk: then every image can be had again. It goes when nobody uses it."""
    features: Any = getattr(dataset, "features", None)
    if features is None:
        raise MalformedDataError(
            "the data set does not say what its columns are", todo="give it features: dataset.cast(features)"
        )
    column = _image_column(features)
    label = next((name for name in _label_columns(features)), None)
    folder = tempfile.TemporaryDirectory(prefix="selfmask-stream-")
    path = Path(folder.name) / "stream.tar"
    room = int(shutil.disk_usage(folder.name).free * _ROOM)
    with tarfile.open(path, "w") as tar:
        for number, row in enumerate(_encoded(dataset, column)):
            try:
                data = _bytes(row[column])
            except (BadImageError, OSError):
                data = b""  # counts as an image that cannot be read
            _add(tar, f"{number:09d}.png", data)  # decoders look at the bytes, not at the name
            if label is not None:
                _add(tar, f"{number:09d}.cls", str(row[label]).encode())
            if tar.offset > room:
                raise DataUnavailableError(
                    "the data set has more images than the disk has room for",
                    expected=f"at most {room:,} bytes, half of what is free in {folder.name}",
                    found=f"more, after {number + 1:,} images",
                    todo="take fewer (dataset.take(100_000)), or set TMPDIR to a larger disk",
                )
    images = open_tars([LocalFile(str(path))])
    images.kept_by = folder  # type: ignore[attr-defined]  # removes itself with the images
    if label is not None and images.labels is not None:
        images.classes = getattr(features[label], "names", None)
    return images


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _package(what: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(
            f"cannot open {what}: the package datasets is not installed", todo="pip install 'selfmask[streams]'"
        ) from None
    return datasets


def _encoded(dataset: Any, column: str) -> Any:
    return dataset.cast_column(column, _package("a data set").Image(decode=False))


def _bytes(value: Any) -> bytes:
    """Of an image as it was saved: its bytes, or the file it was."""
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        return bytes(value["bytes"])
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        with Path(value["path"]).open("rb") as file:
            return file.read(_LARGEST)
    raise BadImageError("not an image", found="an empty row")


def _image_column(features: Any) -> str:
    images = [str(name) for name, kind in features.items() if type(kind).__name__ == "Image"]
    if len(images) != 1:
        raise MalformedDataError(
            "the data set has no column of images" if not images else "the data set has several columns of images",
            expected="one column of the type Image",
            found=", ".join(images or features),
            todo="leave one: dataset.select_columns(...)" if images else "cast it: dataset.cast_column(NAME, Image())",
        )
    return images[0]


def _label_columns(features: Any) -> list[str]:
    classes = [name for name, kind in features.items() if type(kind).__name__ == "ClassLabel"]
    return [name for name in ("label", "labels") if name in classes] or classes


def _labels(dataset: Any) -> tuple[list[int] | None, list[str] | None]:
    for name in _label_columns(dataset.features)[:1]:
        labels: Sequence[Any] = dataset.with_format(None)[name][:]
        if all(isinstance(each, int) and each >= 0 for each in labels):
            return list(labels), list(dataset.features[name].names)
    return None, None


def _numbers(count: int) -> Names:
    return Names(f"{i:06d}".encode() for i in range(count))
