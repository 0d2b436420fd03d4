"""Parquet files with images, and data sets of Hugging Face."""

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from selfmask.data import ImageStore, open_images
from selfmask.data.identity import Unchanged, identity
from selfmask.data.partition import open_split
from selfmask.errors import BadImageError, MalformedDataError, NoImagesError

from .shards import png, serving


def write(path: Path, start: int = 0, count: int = 10, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = range(start, start + count)
    columns = {
        "name": [f"{number:03d}.png" for number in rows],
        "picture": [png(number) for number in rows],
        "label": [number % 2 for number in rows],
        "hash": [bytes([number]) * 8 for number in rows],
    }
    pq.write_table(pa.table(columns | more), path, row_group_size=4)
    return path


def test_rows_are_images(tmp_path: Path) -> None:
    write(tmp_path / "p-0.parquet")
    write(tmp_path / "p-1.parquet", 10, 5)
    images = open_images(f"{tmp_path}/p-{{0..1}}.parquet")
    assert images.names == [f"{number:03d}.png" for number in range(15)]
    assert images.labels == [number % 2 for number in range(15)]
    for number in (14, 0, 9, 10, 3):
        (tmp_path / "one.png").write_bytes(png(number))
        (tmp_path / "list.txt").write_text("one.png\n")
        assert images[number].equal(open_images(tmp_path / "list.txt")[0])
    assert identity(open_images(f"{tmp_path}/p-{{0..1}}.parquet#picture")) == identity(images)
    with serving(tmp_path) as server:
        assert identity(open_images(f"{server.url}/p-{{0..1}}.parquet")) == identity(images)


def test_an_empty_row_and_a_broken_image_are_bad_images(tmp_path: Path) -> None:
    path = write(tmp_path / "p.parquet", picture=[png(0), None, b"broken", *(png(number) for number in range(7))])
    images = open_images(path)
    for number in (1, 2):
        with pytest.raises(BadImageError):
            images[number]
    assert [name for name, _ in ImageStore(images, side=32, max_bad=0.5).bad] == ["001.png", "002.png"]


def test_a_column_that_holds_no_images_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.parquet")
    for column in ("label", "name", "nothing"):
        with pytest.raises(MalformedDataError, match=f"{column} holds no images"):
            open_images(f"{path}#{column}")
    pq.write_table(pa.table({"hash": [b"12345678"], "name": ["a"]}), path)
    with pytest.raises(MalformedDataError, match="no column of images") as caught:
        open_images(path)
    assert "hash (binary)" in str(caught.value)
    write(path, other=[png(number) for number in range(10)])
    with pytest.raises(MalformedDataError, match="several columns of images") as caught:
        open_images(path)
    assert "p.parquet#picture" in str(caught.value)


def test_a_parquet_file_cut_short_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "p.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(MalformedDataError, match=r"p.parquet is no whole parquet file"):
        open_images(path)


@pytest.fixture
def saved(tmp_path: Path) -> datasets.Dataset:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [{"bytes": png(i), "path": None} for i in range(20)], "label": [i % 2 for i in range(20)]}
    return datasets.Dataset.from_dict(rows, features=features)


def test_a_saved_data_set_and_its_parquet_and_the_object_are_the_same(saved: datasets.Dataset, tmp_path: Path) -> None:
    saved.save_to_disk(str(tmp_path / "saved"))
    saved.to_parquet(str(tmp_path / "saved.parquet"))
    found = [open_images(where) for where in (tmp_path / "saved", tmp_path / "saved.parquet", saved)]
    for images in found:
        assert (images.labels, images.classes, len(images)) == ([i % 2 for i in range(20)], ["cat", "dog"], 20)
        assert images.names[3] == "000003"
    assert len({identity(images) for images in found}) == 1
    assert Unchanged(found[0]).holds()
    assert open_split(str(tmp_path / "saved")).divided is False


def test_splits_of_a_saved_data_set(saved: datasets.Dataset, tmp_path: Path) -> None:
    saved.train_test_split(0.25, seed=0).save_to_disk(str(tmp_path / "saved"))
    split = open_split(str(tmp_path / "saved"))
    assert (len(split.train), len(split.test), split.divided) == (15, 5, True)


def test_a_data_set_that_only_comes_by_is_written_down(saved: datasets.Dataset) -> None:
    images = open_images(saved.to_iterable_dataset())
    there = open_images(saved)
    assert (images.labels, images.classes) == (there.labels, there.classes)
    assert all(images[i].equal(there[i]) for i in (0, 19))
    folder = Path(images.shards[0].name).parent  # type: ignore[attr-defined]
    assert folder.exists()
    del images
    assert not folder.exists()


def test_a_stream_that_is_larger_than_the_disk_is_cut_off(
    saved: datasets.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selfmask.data import hugging_face
    from selfmask.errors import DataUnavailableError

    monkeypatch.setattr(hugging_face, "_ROOM", 0.0)
    with pytest.raises(DataUnavailableError, match="more images than the disk has room for"):
        open_images(saved.to_iterable_dataset())


def test_a_data_set_without_images_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "texts"))
    with pytest.raises(MalformedDataError, match="no column of images"):
        open_images(tmp_path / "texts")


def test_a_folder_of_images_with_a_table_beside_them_is_a_folder_of_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(0))
    write(tmp_path / "features.parquet")
    assert open_images(tmp_path).names == ["a.png"]
    (tmp_path / "a.png").unlink()
    assert len(open_images(tmp_path)) == 10
    (tmp_path / "b.tar").write_bytes(b"")
    with pytest.raises(NoImagesError, match="several kinds"):
        open_images(tmp_path)
