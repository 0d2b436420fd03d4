"""iNatLoc500 (Cole et al., 2022), which the paper's cascade was measured on, as its authors' two archives unpack."""

from __future__ import annotations

from pathlib import Path

from ..errors import DataUnavailableError, MalformedDataError
from .folders import read_rows
from .images import printable
from .listed import check_whole, once, relative
from .sources import FileImages

FOLDER = "inatloc500"
PAGE = "https://github.com/visipedia/inat_loc"
_LISTS = "metadata_choe"
_FILES = ("class_names.txt", "train/class_labels.txt", "test/class_labels.txt")
_IMAGES = ("iNatLoc", ".")  # the folder of the archive, or its content


def open_inatloc(split: str, data: Path) -> FileImages:
    """Images of the authors' train or test split; their val split, of as many images as test, is not used."""
    home = data / FOLDER
    lists, root = home / _LISTS, next((home / each for each in _IMAGES if (home / each / "train").is_dir()), None)
    gone = [name for name in _FILES if not (lists / name).is_file()]
    if gone or root is None:
        raise DataUnavailableError(
            "the data set inatloc500 is not on this machine",
            expected=f"{', '.join(_FILES)} in {printable(lists)}, and images in {printable(home)}/iNatLoc",
            found="not the images" if not gone else f"no {gone[0]}" if root else "neither",
            todo=f"extract iNatLoc.tar.gz and metadata_choe.zip of {PAGE} in {printable(home)}",
        )
    try:
        classes = _classes(lists / "class_names.txt")
        parts = {part: _labelled(lists / part / "class_labels.txt", len(classes)) for part in ("train", "test")}
        paths = [path for part in parts.values() for path, _ in part]
        once(paths)
        check_whole(FOLDER, root, paths, data)
    except ValueError as error:
        raise MalformedDataError(
            f"cannot use the lists in {printable(lists)}", found=error, todo=f"get them again from {PAGE}"
        ) from error
    rows = parts["train" if split == "train" else "test"]
    names = [path for path, _ in rows]
    return FileImages([f"{root}/{path}" for path in names], names, [label for _, label in rows], classes)


def _classes(file: Path) -> list[str]:
    """Of lines `name,number`, in the order of the numbers."""
    rows = [row for row in read_rows(file)[1] if len(row) == 2]
    names = {row[1]: printable(Path(row[0])) for row in rows}
    if not names or len(set(names.values())) < len(rows) or set(names) != {str(i) for i in range(len(rows))}:
        raise ValueError(f"a different name for each number from 0 expected in {file.name}")
    return [names[str(i)] for i in range(len(rows))]


def _labelled(file: Path, classes: int) -> list[tuple[str, int]]:
    """Of lines `path,number`."""
    labels = {str(label): label for label in range(classes)}
    rows = []
    for number, row in enumerate(read_rows(file)[1], 1):
        if len(row) != 2 or row[1] not in labels:
            raise ValueError(f"image {number} of {file.parent.name}/{file.name}: a path, and a label below {classes}")
        rows.append((relative(row[0]), labels[row[1]]))
    if not rows:
        raise ValueError(f"no images in {file.parent.name}/{file.name}")
    return rows
