"""Folders of images, and lists of them."""

from __future__ import annotations

import csv
import os
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from .. import checked
from ..errors import MalformedDataError, NoImagesError
from .images import EXTENSIONS, printable
from .names import SortedPaths
from .sources import FileImages

_LARGEST = 1 << 30  # bytes of a list
Split = tuple[str, ...]  # a path below a folder: ("cats", "young", "1.jpg")

# Which sub-folder serves a split, the best first: people call the held-out part "test" or "val".
SPLITS = {"train": ("train",), "test": ("test", "val"), "val": ("val", "test")}


def open_folder(root: Path, split: str, endings: Sequence[str] = EXTENSIONS) -> FileImages:
    """All images below `root`, that is, files with these endings, sorted by path.

    With sub-folders `train` and `test` (or `val`), those of the one that `split` picks. If every image lies in a
    sub-folder, and there are two such sub-folders or more, they are the classes.
    """
    parts = [name for name in SPLITS if (root / name).is_dir()]
    if "train" not in parts or len(parts) == 1:
        return _undivided(_labelled(root, _images(root, endings), ()))
    chosen = next(name for name in SPLITS[split] if name in parts)
    # A class may lack images in one part, so that all parts together say which classes there are.
    others = [_walk(root / name, endings)[0].tops for name in parts if name != chosen]
    return _labelled(root / chosen, _images(root / chosen, endings), set[str]().union(*others))


def _undivided(images: FileImages) -> FileImages:
    images.undivided = True
    return images


def open_list(file: Path, split: str) -> FileImages:
    """A text file with one path a line, relative to the file; after a tab or a comma, optionally, its label.

    A further column may say of each image whether it is of `train`, `test` or `val`: the third, or the one that the
    heading calls `split`. Then the images are those of the part that `split` picks, as of a folder with such parts.
    """
    heading, rows = read_rows(file)
    if not rows:
        raise NoImagesError(f"no images are listed in {printable(file)}", expected="one path per line")
    parts = _parts(file, heading, rows)
    images = _listed(file, rows)
    if parts is None:
        return _undivided(images)
    if "train" not in parts or len(set(parts)) == 1:
        raise MalformedDataError(
            f"{printable(file)} names a split for each image, but all are of {' and '.join(sorted(set(parts)))}",
            expected="images of train, and of test or val",
            todo="add the others, or remove the column: a fifth of each class is then tested with",
        )
    chosen = next(name for name in SPLITS[split] if name in parts)
    numbers = [number for number, part in enumerate(parts) if part == chosen]
    labels = None if images.labels is None else [images.labels[number] for number in numbers]
    files, names = ([each[number] for number in numbers] for each in (images.files, images.names))
    return FileImages(files, names, labels, images.classes)  # classes of all parts, as a part may lack some


def _parts(file: Path, heading: list[str], rows: list[list[str]]) -> list[str] | None:
    """The split of each row, taken out of the rows; or nothing, if the list does not name any."""
    if "split" in heading[1:]:
        place = heading.index("split")
    elif all(len(row) == 3 and row[2].lower() in SPLITS for row in rows):
        place = 2
    else:
        return None
    for number, row in enumerate(rows, 1):
        if len(row) != max(place + 1, len(heading)) or row[place].lower() not in SPLITS:
            raise MalformedDataError(
                f"{printable(file)}: image {number} is of no split",
                expected=f"one of {', '.join(SPLITS)} in column {place + 1} of every line",
                found=printable(Path(", ".join(row))),
            )
    parts = [row.pop(place).lower() for row in rows]
    if all(len(row) == 2 and not row[1] for row in rows):  # path,,train: without labels
        for row in rows:
            del row[1]
    return parts


def _listed(file: Path, rows: list[list[str]]) -> FileImages:
    files = [str(file.parent / path) for path, *_ in rows]
    names = [printable(Path(path)) for path, *_ in rows]
    if all(len(row) == 1 for row in rows):
        return FileImages(files, names)
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise MalformedDataError(
                f"{printable(file)}: image {number} has {'no label' if len(row) == 1 else 'more than one label'}",
                expected="path and label on every line, or only the path on every line; a third column may name the "
                f"split ({', '.join(SPLITS)})",
                found=printable(Path(", ".join(row))),
                todo='quote paths that contain a comma ("a,b.jpg"), or separate path and label with a tab',
            )
    texts = [printable(Path(label)) for _, label in rows]
    if all(text.isascii() and text.isdecimal() and len(text) < 10 for text in texts):
        return FileImages(files, names, [int(text) for text in texts])
    classes = sorted(set(texts))
    index = {text: i for i, text in enumerate(classes)}
    return FileImages(files, names, [index[text] for text in texts], classes)


def _labelled(root: Path, found: SortedPaths, elsewhere: Collection[str]) -> FileImages:
    names = found.names()
    known, files = {*found.tops, *elsewhere}, names.below(str(root))
    if len(known) < 2 or found.flat:
        return FileImages(files, names)
    return FileImages(files, names, *labels_by_folder(map(names.top, range(len(names))), known))


def labels_by_folder(tops: Iterable[str], known: Collection[str]) -> tuple[list[int], list[str]]:
    """Labels and classes, by the sub-folder that each image lies in."""
    index = {top: i for i, top in enumerate(sorted(known))}
    return [index[top] for top in tops], [printable(Path(top)) for top in index]


def _images(root: Path, endings: Sequence[str]) -> SortedPaths:
    images, others = _walk(root, endings)
    if not (images.flat or images.tops):
        seen = ", ".join(f"{count} x {kind or 'no extension'}" for kind, count in others.most_common(5))
        raise NoImagesError(
            f"there are no images in {printable(root)}",
            expected=f"files ending in {' '.join(endings)}",
            found=f"only other files: {seen}" if others else "no files at all",
            todo="give the folder that contains the images, or convert them first",
        )
    return images


def _walk(root: Path, endings: Sequence[str]) -> tuple[SortedPaths, Counter[str]]:
    """The images below `root`, and how many files of other kinds there are.

    Links to folders are followed after all real folders, and no folder is entered twice, nor one that `root` lies in:
    links in a circle end, and an image found by two ways counts once, under its real name.
    """
    images = SortedPaths()
    others: Counter[str] = Counter()
    entered = {_identity(parent) for parent in root.resolve().parents}
    waiting: deque[tuple[Path, Split]] = deque([(root, ())])
    while waiting:
        folder, above = waiting.popleft()
        if (identity := _identity(folder)) in entered:
            continue
        entered.add(identity)
        folders = list[os.DirEntry[str]]()
        for entry in _entries(folder):
            if is_hidden(entry.name):
                continue
            if _is_folder(entry):
                folders.append(entry)
            elif (kind := Path(entry.name).suffix.lower()) in endings:
                images.add((*above, entry.name))
            else:
                others[printable(Path(kind)) if kind else ""] += 1
        for entry in sorted(folders, key=lambda entry: entry.name):
            later = waiting.append if entry.is_symlink() else waiting.appendleft
            later((Path(entry.path), (*above, entry.name)))
    return images, others


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or to where we may not look
        return False


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def is_hidden(name: str) -> bool:
    """Whether this is of no interest to people: what systems leave beside their files."""
    return name.startswith(".") or name == "__MACOSX"


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """One at a time: there may be millions."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise NoImagesError(
            f"cannot open the folder {printable(folder)}",
            found=error.strerror,
            todo="give this user permission to read it, or give a list file of the images",
        ) from error


def read_rows(file: Path) -> tuple[list[str], list[list[str]]]:
    """The heading, if there is one, and the fields of each line; bytes that are no UTF-8 survive, as in file names."""
    try:
        text = os.fsdecode(checked.content(file, most=_LARGEST)).removeprefix("\ufeff")
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or error
        raise NoImagesError(f"cannot read the list {printable(file)}", found=found) from error
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                cells = line.split("\t") if "\t" in line else next(csv.reader([line.strip()], skipinitialspace=True))
            except csv.Error as error:  # a carriage return within, or a field without end
                raise MalformedDataError(
                    f"{printable(file)}: line {number} cannot be read", expected="a path, and its label", found=error
                ) from error
            rows.append([cell.strip() for cell in cells])
    heading: list[str] = []
    if len(rows) > 1 and rows[0][0].lower() in ("path", "file", "filename", "image", "name"):
        heading = [cell.lower() for cell in rows.pop(0)]
    return heading, rows
