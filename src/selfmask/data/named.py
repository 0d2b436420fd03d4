"""Data sets known by name: the bundled one, array files in the data folder, those of the paper, and torchvision's."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset

from ..errors import DataUnavailableError, MalformedDataError, UnknownDataError
from .coop import COOP, open_coop, split_file
from .folders import SPLITS
from .images import printable
from .inatloc import FOLDER, open_inatloc
from .listed import check_whole
from .npz import TooLargeError, open_npz
from .sources import ArrayImages, DatasetImages, Images

BUNDLED = {"selfmask/fashion": Path(__file__).parent / "bundled" / "fashion.npz"}

# How torchvision's data sets are asked for the training part and for the test part.
_Ask = tuple[list[dict[str, Any]], list[dict[str, Any]]]
_FLAG: _Ask = ([{"train": True}], [{"train": False}])
_TWO: _Ask = ([{"split": "train"}], [{"split": "test"}])
_THREE: _Ask = ([{"split": "train"}, {"split": "val"}], [{"split": "test"}])  # val is for training, as with CoOp's
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


ALIASES = {"flowers": "flowers102", "pets": "oxfordiiitpet"}


def data_folder() -> Path:
    """Where named data sets lie: the environment variable SELFMASK_DATA, or a folder in the user's cache."""
    return Path(os.environ.get("SELFMASK_DATA") or "~/.cache/selfmask/data").expanduser()


def local_arrays() -> dict[str, Path]:
    """Array files in the data folder, by the names of data sets that they give."""
    return {printable(Path(file.stem)): file for file in sorted(data_folder().glob("*.npz")) if file.is_file()}


def known_names() -> list[str]:
    """Every name that `open_named` takes on this machine."""
    return sorted({*BUNDLED, *local_arrays(), *TORCHVISION, *COOP, FOLDER, *ALIASES})


def open_named(name: str, split: str, *, fetch: bool = True) -> Images:
    """The data set of that name: bundled, else NAME.npz in the data folder, else with CoOp's split, else torchvision's.

    fetch: whether torchvision may download what is not there.
    """
    if name in BUNDLED:
        return open_arrays(BUNDLED[name], split)
    data = data_folder()
    if "/" not in name and (local := data / f"{name}.npz").is_file():
        return open_arrays(local, split)
    known = ALIASES.get(name.lower(), name.lower())
    if known == FOLDER:
        return _divided_by("authors", open_inatloc(split, data), "the split is that of its authors")
    if known in COOP and (known not in TORCHVISION or split_file(known, data).is_file()):
        return _divided_by("CoOp", open_coop(known, split, data), "the split is CoOp's, as in the paper")
    if known in TORCHVISION:
        images: Images = DatasetImages(_fetched(known, split, fetch))
        images.undivided = TORCHVISION[known][1] is _WHOLE
        said = "the paper used CoOp's split (`selfmask datasets` says how to get it)" if known in COOP else ""
        if images.undivided:
            images.note = said
            return images
        return _divided_by("torchvision", images, "; ".join(filter(None, ["the split is torchvision's", said])))
    close = difflib.get_close_matches(name.lower(), known_names(), n=3, cutoff=0.5)
    raise UnknownDataError(
        f"there is no folder, file or data set {printable(Path(name))}",
        expected=f"a path, or one of {', '.join(known_names())}",
        todo=f"did you mean {' or '.join(close)}?" if close else "check the path, or use one of these names",
    )


def _divided_by(whom: str, images: Images, note: str) -> Images:
    images.divided_by, images.note = whom, note
    return images


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


def _fetched(name: str, split: str, fetch: bool) -> Dataset[Any]:
    kind, (train, test) = TORCHVISION[name]
    parts = [_part(name, kind, arguments, fetch) for arguments in (train if split == "train" else test)]
    if name == "sun397" and (files := getattr(parts[0], "_image_files", None)):  # in the order of the file system
        return Subset(parts[0], sorted(range(len(files)), key=files.__getitem__))
    return parts[0] if len(parts) == 1 else ConcatDataset(parts)


def _part(name: str, kind: str, arguments: dict[str, Any], fetch: bool) -> Dataset[Any]:
    import torchvision.datasets  # not before a data set is asked for: it loads torch's compiler, which takes seconds

    build, folder = getattr(torchvision.datasets, kind), data_folder()
    found: Dataset[Any]
    try:
        found = build(folder, download=False, **arguments)
    except Exception as error:  # not there, or not whole; each data set says so in its own way
        if not fetch:
            raise _unavailable(name, "is not whole, or not on this machine", error) from error
        try:
            found = build(folder, download=True, **arguments)
        except Exception as error:
            raise _unavailable(name, "is not on this machine and could not be downloaded", error) from error
    _check_files(name, found, folder)
    return found


def _check_files(name: str, found: Dataset[Any], folder: Path) -> None:
    """torchvision takes the word of a list for it that the images it names are there."""
    for attribute in ("_image_files", "_images"):
        files = getattr(found, attribute, None)
        if isinstance(files, list) and files:
            try:
                check_whole(name, folder, [os.path.relpath(file, folder) for file in files], folder)
            except ValueError as error:
                raise MalformedDataError(f"cannot use the lists of the data set {name}", found=error) from error


def _unavailable(name: str, what: str, error: Exception) -> DataUnavailableError:
    folder = data_folder()
    coop = f"; or put CoOp's split at {printable(split_file(name, folder))}, beside the images" if name in COOP else ""
    return DataUnavailableError(
        f"the data set {name} {what}",
        expected=f"its files under {printable(folder)}, or internet access",
        found=f"{type(error).__name__}: {error}",
        todo=f"on a machine with internet access, open {name} once and copy that folder; or save the images "
        f"there as {name}.npz (arrays train_images, train_labels, test_images, test_labels); or set "
        f"SELFMASK_DATA to the folder that contains them{coop}",
    )
