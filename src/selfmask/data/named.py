"""Data sets known by name: the bundled one, array files in the data folder, and torchvision's."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from ..errors import DataUnavailableError, MalformedDataError, UnknownDataError
from .folders import SPLITS
from .images import printable
from .npz import TooLargeError, open_npz
from .sources import ArrayImages, DatasetImages, Images

BUNDLED = {"selfmask/fashion": Path(__file__).parent / "bundled" / "fashion.npz"}

# How torchvision's data sets are asked for the training part and for the test part.
_Ask = tuple[list[dict[str, Any]], list[dict[str, Any]]]
_FLAG: _Ask = ([{"train": True}], [{"train": False}])
_TWO: _Ask = ([{"split": "train"}], [{"split": "test"}])
_THREE: _Ask = ([{"split": "train"}, {"split": "val"}], [{"split": "test"}])  # as the paper: val is for training
_JOINED: _Ask = ([{"split": "trainval"}], [{"split": "test"}])
_WHOLE: _Ask = ([{}], [{}])  # not divided: both are all of it
TORCHVISION: dict[str, tuple[str, _Ask]] = {
    "cifar10": ("CIFAR10", _FLAG),
    "cifar100": ("CIFAR100", _FLAG),
    "mnist": ("MNIST", _FLAG),
    "fashionmnist": ("FashionMNIST", _FLAG),
    "kmnist": ("KMNIST", _FLAG),
    "usps": ("USPS", _FLAG),
    "svhn": ("SVHN", _TWO),
    "stl10": ("STL10", _TWO),
    "food101": ("Food101", _TWO),
    "flowers102": ("Flowers102", _THREE),
    "dtd": ("DTD", _THREE),
    "oxfordiiitpet": ("OxfordIIITPet", _JOINED),
    "fgvcaircraft": ("FGVCAircraft", _JOINED),
    "eurosat": ("EuroSAT", _WHOLE),
    "sun397": ("SUN397", _WHOLE),
}


def data_folder() -> Path:
    """Where named data sets lie: the environment variable SELFMASK_DATA, or a folder in the user's cache."""
    return Path(os.environ.get("SELFMASK_DATA") or "~/.cache/selfmask/data").expanduser()


def known_names() -> list[str]:
    """Every name that `open_named` takes on this machine."""
    local = [printable(Path(file.stem)) for file in data_folder().glob("*.npz")]
    return sorted({*BUNDLED, *local, *TORCHVISION})


def open_named(name: str, split: str) -> Images:
    """The data set of that name: bundled, else NAME.npz in the data folder, else torchvision's, fetched if need be."""
    if name in BUNDLED:
        return open_arrays(BUNDLED[name], split)
    local = data_folder() / f"{name}.npz"
    if "/" not in name and local.is_file():
        return open_arrays(local, split)
    if name.lower() in TORCHVISION:
        images = DatasetImages(_fetched(name.lower(), split))
        images.undivided = TORCHVISION[name.lower()][1] is _WHOLE
        return images
    close = difflib.get_close_matches(name.lower(), known_names(), n=3, cutoff=0.5)
    raise UnknownDataError(
        f"there is no folder, file or data set {printable(Path(name))}",
        expected=f"a path, or one of {', '.join(known_names())}",
        todo=f"did you mean {' or '.join(close)}?" if close else "check the path, or use one of these names",
    )


def open_arrays(file: Path, split: str) -> ArrayImages:
    """An .npz file with arrays `train_images`, `train_labels`, `test_images`, `test_labels` and `classes`.

    Images are uint8, N x H x W or N x H x W x 3. Labels and class names may be missing.
    """
    if not file.is_file():  # a pipe would be waited for
        raise _malformed(file, "an .npz file of plain arrays", "something that is not a regular file")
    try:
        with open_npz(file) as arrays:
            part = next((part for part in SPLITS[split] if f"{part}_images" in arrays), None)
            if part is None:
                raise _malformed(file, f"an array {split}_images", ", ".join(arrays.names) or "no array")
            pixels = arrays.read(f"{part}_images")
            labels = arrays.read(name, as_list=True) if (name := f"{part}_labels") in arrays else None
            classes = arrays.read("classes", as_list=True) if "classes" in arrays else None
    except MalformedDataError:
        raise
    except TooLargeError as error:
        raise MalformedDataError(
            f"the arrays in {printable(file)} do not fit into memory",
            expected="arrays that do, unpacked",
            found=str(error),
            todo="store the images as files in a folder, from which they are read as needed",
        ) from error
    except Exception as error:  # zip, zlib and numpy raise many kinds on damaged files
        raise _malformed(file, "an .npz file of plain arrays", f"{type(error).__name__}: {error}"[:200]) from error
    if pixels.dtype != np.uint8 or not (pixels.ndim == 3 or (pixels.ndim == 4 and pixels.shape[3] == 3)):
        raise _malformed(file, "images as uint8, N x H x W or N x H x W x 3", f"{pixels.dtype} {pixels.shape}")
    if pixels.size == 0 and len(pixels):
        raise _malformed(file, "images with pixels", f"{pixels.dtype} {pixels.shape}")
    if labels is not None and (labels.shape != pixels.shape[:1] or not np.issubdtype(labels.dtype, np.integer)):
        raise _malformed(file, f"one integer label for each of {len(pixels)} images", f"{labels.dtype} {labels.shape}")
    names = None if classes is None else [str(name) for name in classes.ravel()]
    if labels is not None and len(labels) and (labels.min() < 0 or (names is not None and labels.max() >= len(names))):
        allowed = "labels from 0" if names is None else f"labels from 0 to {len(names) - 1}, one for each class name"
        raise _malformed(file, allowed, f"{labels.min()} to {labels.max()}")
    return ArrayImages(pixels, None if labels is None else [int(label) for label in labels], names)


def _malformed(file: Path, expected: str, found: str) -> MalformedDataError:
    return MalformedDataError(f"cannot use the arrays in {printable(file)}", expected=expected, found=found)


def _fetched(name: str, split: str) -> Dataset[Any]:
    kind, (train, test) = TORCHVISION[name]
    parts = [_part(name, kind, arguments) for arguments in (train if split == "train" else test)]
    return parts[0] if len(parts) == 1 else ConcatDataset(parts)


def _part(name: str, kind: str, arguments: dict[str, Any]) -> Dataset[Any]:
    import torchvision.datasets  # not before a data set is asked for: it loads torch's compiler, which takes seconds

    build, folder = getattr(torchvision.datasets, kind), data_folder()
    try:
        here: Dataset[Any] = build(folder, download=False, **arguments)
        return here
    except Exception:  # not there, or not whole; each data set says so in its own way
        try:
            fetched: Dataset[Any] = build(folder, download=True, **arguments)
            return fetched
        except Exception as error:
            raise DataUnavailableError(
                f"the data set {name} is not on this machine and could not be downloaded",
                expected=f"its files under {printable(folder)}, or internet access",
                found=f"{type(error).__name__}: {error}",
                todo=f"on a machine with internet access, open {name} once and copy that folder; or save the images "
                f"there as {name}.npz (arrays train_images, train_labels, test_images, test_labels); or set "
                "SELFMASK_DATA to the folder that contains them",
            ) from error
