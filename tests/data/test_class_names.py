"""Names of classes, one a line."""

from pathlib import Path

import pytest

from selfmask.data.class_names import read_class_names
from selfmask.errors import MalformedDataError


def test_names_are_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "names.txt"
    file.write_bytes("\ufeffT-shirt/top\r\n\r\n  ankle boot \n東京\n\n".encode())
    assert read_class_names(file) == ["T-shirt/top", "ankle boot", "東京"]


@pytest.mark.parametrize(
    ("content", "match"),
    [(b"bag\ncoat\n bag\n", "'bag' twice"), (b"\n \n", "no name"), (b"", "no name"), (b"caf\xe9\n", "UTF-8")],
)
def test_files_that_name_no_classes_are_refused(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "names.txt").write_bytes(content)
    with pytest.raises(MalformedDataError, match=match):
        read_class_names(tmp_path / "names.txt")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(MalformedDataError, match="check the path"):
            read_class_names(path)
