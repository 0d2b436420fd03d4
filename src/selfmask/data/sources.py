"""What every source of images becomes: names, labels where known, and one decoded image at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from ..errors import BadImageError, MalformedDataError, NoImagesError
from .images import MAX_PIXELS, array_to_rgb, check_pixels, decode_image, to_rgb


class Images(Dataset[Tensor]):
    """Images in a fixed order. `images[i]` is uint8 [3, H, W] in RGB, or raises BadImageError.

    names: file names, or numbers where there are no files; valid UTF-8.
    labels: the class index of each image, where known.
    classes: what the indices mean, where known.
    undivided: whether these are all images of a source that has no train and test splits.
    divided_by: whose split this is, where the data set is known by name and has several: "CoOp", "torchvision", ...
    note: what a user should know of that, in a line.
    max_pixels: images with more pixels than this count as unreadable.
    hashes: short ones of the content of each, once somebody has asked for the identity.
    own_names: whether names belong to the images, whatever else there is beside them; else they tell their places.
    """

    undivided = False
    divided_by = ""
    note = ""
    max_pixels = MAX_PIXELS
    hashes: bytes | None = None
    own_names = False

    def __init__(self, names: Sequence[str], labels: list[int] | None = None, classes: list[str] | None = None) -> None:
        if not len(names):
            raise NoImagesError("the data set is empty", expected="at least one image")
        self.names, self.labels, self.classes = names, labels, classes

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> Tensor:
        return self.load(i)

    def load(self, i: int, *, near: int | None = None) -> Tensor:
        """`images[i]`; a caller that needs no more than `near` pixels a side may get a large file at reduced size."""
        raise NotImplementedError

    def origin(self, i: int) -> tuple[Images, int]:
        """The images that image i really is of, where these are a choice of others, and its number there."""
        return self, i


class FileImages(Images):
    """Image files."""

    own_names = True

    def __init__(
        self,
        files: Sequence[str],
        names: Sequence[str],
        labels: list[int] | None = None,
        classes: list[str] | None = None,
    ) -> None:
        super().__init__(names, labels, classes)
        self.files = files

    def load(self, i: int, *, near: int | None = None) -> Tensor:
        return decode_image(Path(self.files[i]), near=near, max_pixels=self.max_pixels)


class ArrayImages(Images):
    """Images in one uint8 array, N x H x W or N x H x W x 3."""

    def __init__(
        self, pixels: NDArray[np.uint8], labels: list[int] | None = None, classes: list[str] | None = None
    ) -> None:
        super().__init__(_numbers(len(pixels)), labels, classes)
        self.pixels = pixels

    def load(self, i: int, *, near: int | None = None) -> Tensor:
        image = torch.from_numpy(self.pixels[i])
        return image.expand(3, *image.shape).contiguous() if image.ndim == 2 else image.permute(2, 0, 1).contiguous()


class SomeImages(Images):
    """Some of other images, by their numbers."""

    def __init__(self, images: Images, numbers: Sequence[int]) -> None:
        labels = None if images.labels is None else [images.labels[i] for i in numbers]
        super().__init__([images.names[i] for i in numbers], labels, images.classes)
        self.images, self.numbers = images, list(numbers)
        self.max_pixels, self.note, self.own_names = images.max_pixels, images.note, images.own_names

    def load(self, i: int, *, near: int | None = None) -> Tensor:
        return self.images.load(self.numbers[i], near=near)

    def origin(self, i: int) -> tuple[Images, int]:
        return self.images.origin(self.numbers[i])


class JoinedImages(Images):
    """Several sets of images, one after the other; the names of each set get its own name in front."""

    def __init__(self, parts: dict[str, Images]) -> None:
        sets = list(parts.values())
        labels: list[int] | None = None
        if all(part.labels is not None and part.classes == sets[0].classes for part in sets):
            labels = [label for part in sets for label in part.labels or ()]
        names = [f"{name}/{each}" for name, part in parts.items() for each in part.names]
        super().__init__(names, labels, None if labels is None else sets[0].classes)
        self.places = [(part, i) for part in sets for i in range(len(part))]
        self.max_pixels = sets[0].max_pixels
        self.own_names = all(part.own_names for part in sets)

    def load(self, i: int, *, near: int | None = None) -> Tensor:
        part, number = self.places[i]
        return part.load(number, near=near)

    def origin(self, i: int) -> tuple[Images, int]:
        part, number = self.places[i]
        return part.origin(number)


class DatasetImages(Images):
    """Any map-style data set of PyTorch whose items are images, or begin with one.

    An image is a Pillow image, a tensor [C, H, W] (uint8, or float from 0 to 1) or an array H x W x C.
    Labels are kept where they can be had without reading the images.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        try:
            count = len(dataset)  # type: ignore[arg-type]
        except TypeError:
            raise MalformedDataError(
                "the data set has no length",
                expected="a data set with __len__ and __getitem__",
                found=type(dataset).__name__,
                todo="give a map-style data set, or write an iterable one to a folder first",
            ) from None
        super().__init__(_numbers(count), _labels(dataset), _classes(dataset))
        self.dataset = dataset

    def load(self, i: int, *, near: int | None = None) -> Tensor:
        name = self.names[i]
        try:
            item = self.dataset[i]
            return _to_tensor(item[0] if isinstance(item, tuple | list) else item, self.max_pixels)
        except BadImageError:
            raise
        except Exception as error:  # whatever the data set raises, it is this image that cannot be had
            raise BadImageError(f"cannot read image {name}", found=f"{type(error).__name__}: {error}") from error


def _to_tensor(item: object, max_pixels: int) -> Tensor:
    if isinstance(item, Image.Image):
        check_pixels(item.width * item.height, max_pixels)
        return to_rgb(item)
    if isinstance(item, Tensor):
        values = item.detach().cpu()
        values = values.float() if values.is_floating_point() else values
        item = (values.permute(1, 2, 0) if values.ndim == 3 else values).numpy()
    if isinstance(item, np.ndarray):
        return array_to_rgb(item)
    raise BadImageError(
        "not an image",
        expected="a Pillow image, a tensor [C, H, W] or an array H x W x C",
        found=type(item).__name__,
    )


def _numbers(count: int) -> list[str]:
    return [f"{i:06d}" for i in range(count)]


def _labels(dataset: Any) -> list[int] | None:
    """Labels as the data sets of torchvision carry them, also through `Subset` and `ConcatDataset`."""
    if isinstance(dataset, Subset):
        inner = _labels(dataset.dataset)
        return None if inner is None else [inner[i] for i in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [_labels(part) for part in dataset.datasets]
        if any(part is None for part in parts) or any(_classes(part) != _classes(dataset) for part in dataset.datasets):
            return None  # also where the same number means another class in another part
        return [label for part in parts if part for label in part]
    for attribute in ("targets", "labels", "_labels"):
        values = getattr(dataset, attribute, None)
        if isinstance(values, Sequence | np.ndarray | Tensor) and len(values) == len(dataset):
            try:
                numbers = np.asarray(values)
            except ValueError:  # ragged
                continue
            if numbers.ndim == 1 and np.issubdtype(numbers.dtype, np.integer):
                return [int(number) for number in numbers]
    return None


def _classes(dataset: Any) -> list[str] | None:
    if isinstance(dataset, Subset):
        return _classes(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        first, *others = (_classes(part) for part in dataset.datasets)
        return first if all(other == first for other in others) else None
    names = getattr(dataset, "classes", None)
    return [str(name) for name in names] if isinstance(names, list | tuple) and names else None
