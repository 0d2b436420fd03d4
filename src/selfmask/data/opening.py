"""From what a user names to images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from ..errors import ConfigError, NoImagesError
from .folders import SPLITS, open_folder, open_list
from .hugging_face import is_dataset, is_saved, open_dataset, open_saved
from .images import EXTENSIONS, MAX_PIXELS, printable
from .named import BUNDLED, open_arrays, open_named
from .sharded import KINDS, is_sharded, open_folder_of_shards, open_sharded
from .sources import DatasetImages, Images
from .videos import ENDINGS, open_folder_of_videos, with_rate

_LISTS = (".txt", ".csv")


def open_images(where: str | Path | Dataset[Any], *, split: str = "train", max_pixels: int = MAX_PIXELS) -> Images:
    """Images from a folder, a list file (.txt, .csv), an array file (.npz), a data set's name, or a PyTorch data set.

    Also from shards (.tar, .parquet): a folder of them, a file, names in braces (`photos-{000..019}.tar`), URLs of what
    fsspec opens (`s3://...`); from data sets of Hugging Face, saved ones or objects; and from videos, or a folder of
    them, a frame of each second, or so many: `movie.mp4#fps=2`.

    split: "train", "test" or "val", where the source is divided; otherwise every split is all of it. "test" and "val"
    stand in for each other. A folder or file that exists goes before a data set of that name.
    max_pixels: images with more pixels count as unreadable. (`Images` have been opened, and keep the limit they have.)
    """
    if split not in SPLITS:
        raise ConfigError("unknown split", expected=", ".join(SPLITS), found=repr(split))
    if max_pixels < 1:
        raise ConfigError("max_pixels is out of range", expected="1 or more", found=max_pixels)
    if isinstance(where, Images):
        return where
    images = _open(where, split)
    images.max_pixels = max_pixels
    return images


def _open(where: str | Path | Dataset[Any], split: str) -> Images:
    if is_dataset(where):
        return open_dataset(where)
    if isinstance(where, Dataset):
        return DatasetImages(where)
    if not isinstance(where, str | Path):
        raise ConfigError(
            "cannot read images from this object", expected="a path, a name or a Dataset", found=type(where)
        )
    if str(where) in BUNDLED:
        return open_named(str(where), split)
    path = Path(os.path.expanduser(where))  # noqa: PTH111  # Path.expanduser raises where there is no such user
    kind = path.suffix.lower()
    folder, rate = with_rate(str(path))
    if rate is not None and os.path.isdir(folder):  # noqa: PTH112
        return open_folder_of_videos(Path(folder), split, rate)
    if is_sharded(str(where)) and not os.path.isdir(path):  # noqa: PTH112  # which raises on those, too
        return open_sharded(str(where))
    if not os.path.exists(path):  # noqa: PTH110  # Path.exists raises on names that no path can have
        if isinstance(where, str) and _is_name(where):
            return open_named(where, split)
        raise NoImagesError(f"{printable(path)} does not exist", expected="a folder or a file", todo="check the path")
    if path.is_dir():
        if is_saved(path):
            return open_saved(path, split)
        return open_folder_of_shards(path, split) or _open_folder(path, split)
    if kind in _LISTS:
        return open_list(path, split)
    if kind == ".npz":
        return open_arrays(path, split)
    raise NoImagesError(
        f"cannot read images from the file {printable(path)}",
        expected=f"a folder, a list file ({', '.join(_LISTS)}), an array file (.npz), shards ({', '.join(KINDS)}) or a "
        f"video ({', '.join(ENDINGS)})",
        found="a single image" if kind in EXTENSIONS else f"a file {kind or 'without an extension'}",
        todo="give the folder that contains it, or a list file that names it" if kind in EXTENSIONS else None,
    )


def _open_folder(path: Path, split: str) -> Images:
    """Of images; only if there are none, of videos."""
    try:
        return open_folder(path, split)
    except NoImagesError as error:
        try:
            return open_folder_of_videos(path, split, None)
        except NoImagesError:
            raise error from None


def _is_name(where: str) -> bool:
    """Whether it was meant as a data set's name, not as a path."""
    return where.startswith("selfmask/") or not ("/" in where or os.sep in where or where.startswith((".", "~")))
