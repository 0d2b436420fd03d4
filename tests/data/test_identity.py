"""Whether images are still those that were looked at, hours ago."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from selfmask.data import SomeImages, open_images
from selfmask.data.identity import Unchanged, digest, stamps
from selfmask.errors import ImagesChangedError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    chance = np.random.default_rng(0)
    for i in range(6):
        Image.fromarray(chance.integers(0, 256, (8, 8, 3), np.uint8)).save(tmp_path / f"{i}.bmp")
    return tmp_path


def replace_unseen(file: Path) -> None:
    """Other content, of the same length and with the same times, as far as these can be set."""
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 255
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_replaced_image_is_noticed_whatever_its_size_and_time(photos: Path) -> None:
    same = Unchanged(open_images(photos))
    same.check()
    replace_unseen(photos / "3.bmp")
    assert not same.holds()
    with pytest.raises(ImagesChangedError, match="put them back"):
        same.check()
    replace_unseen(photos / "3.bmp")  # and back again
    same.check()


def test_a_file_that_was_only_touched_is_the_same(photos: Path) -> None:
    same = Unchanged(open_images(photos))
    (photos / "3.bmp").touch()
    (photos / "4.bmp").chmod(0o600)
    assert same.holds()


def test_a_removed_image_is_noticed(photos: Path) -> None:
    same = Unchanged(open_images(photos))
    (photos / "3.bmp").unlink()
    assert not same.holds()


def test_some_images_have_a_digest_and_stamps_of_their_own(photos: Path) -> None:
    images = open_images(photos)
    some = SomeImages(images, [1, 3, 5])
    before = digest(images, [1, 3]), digest(images, [2]), stamps(images, [1, 3]), stamps(images, [2])
    assert (digest(some, [0, 1]), stamps(some, [0, 1])) == (before[0], before[2])
    replace_unseen(photos / "3.bmp")
    after = digest(images, [1, 3]), digest(images, [2]), stamps(images, [1, 3]), stamps(images, [2])
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True, False, True]
