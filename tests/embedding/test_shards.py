"""Vectors in shards: those of one process, whoever writes them and however often it is stopped."""

import json
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from selfmask.data import Images, open_images, places
from selfmask.data.recent import Recent
from selfmask.embedding import features
from selfmask.embedding.features import write_features
from selfmask.embedding.shards import MANIFEST, Sharded, Shards, write_shards
from selfmask.errors import ConfigError, DataUnavailableError, RunExistsError, RunMismatchError

from ..cli.inside import selfmask
from ..data.shards import serving
from ..data.shards import shards as tars
from .samples import embedder, pictures
from .test_features import Numbered, read


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_PART", 16)


def write(folder: Path, which: str, images: Images | None = None, *, resume: bool = False) -> Sharded:
    return write_shards(
        folder,
        Shards.named(which),
        embedder(),
        images or Numbered(100),
        batch_size=8,
        resume=resume,
        say=lambda _: None,
    )


def test_together_they_are_the_vectors_of_one_process(tmp_path: Path) -> None:
    write_features(tmp_path / "one.parquet", embedder(), Numbered(100), batch_size=8)
    out = tmp_path / "out"
    for which in ("3/3", "1/3"):
        assert not write(out, which).finished
    assert "shards" not in json.loads((out / MANIFEST).read_text())
    assert write(out, "2/3").finished
    found = ds.dataset(out, format="parquet").to_table()
    names, vectors = read(tmp_path / "one.parquet")
    assert found["name"].to_pylist() == names
    assert np.array_equal(np.stack(found["vector"].to_numpy(zero_copy_only=False)), vectors)
    rows = duckdb.sql(f"select name, vector from read_parquet('{out}/*.parquet')")
    assert sorted(name for name, _ in rows.fetchall()) == sorted(names)
    manifest = json.loads((out / MANIFEST).read_text())
    assert [entry["rows"] for entry in manifest["shards"]] == [31, 31, 35]
    assert [entry["bad"] for entry in manifest["shards"]] == [1, 1, 1]
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith("_")) == [
        entry["file"] for entry in manifest["shards"]
    ]
    assert not (out / "_partial").exists()


def test_resume_redoes_only_what_is_missing_or_damaged(tmp_path: Path) -> None:
    write(tmp_path, "all/4")
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("*.parquet")}
    with pytest.raises(RunExistsError, match="has shard 2/4 already"):
        write(tmp_path, "2/4")
    (tmp_path / "00002-of-00004.parquet").unlink()
    third = bytearray(whole["00003-of-00004.parquet"])
    third[500] ^= 1
    (tmp_path / "00003-of-00004.parquet").write_bytes(third)
    images = Numbered(100)
    done = write(tmp_path, "all/4", images, resume=True)
    assert (sorted(done.written), done.kept, done.finished) == ([2, 3], [1, 4], True)
    assert {*images.asked} == {*range(24, 72)}
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.parquet")} == whole


def test_stopped_within_a_shard_it_goes_on_there(tmp_path: Path) -> None:
    write(tmp_path / "whole", "all/2")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "cut", "all/2", Numbered(100, stop_at=95))
    images = Numbered(100)
    done = write(tmp_path / "cut", "all/2", images, resume=True)
    assert (done.kept, done.finished) == ([1], True)
    assert done.written[2].resumed > 0
    for name in ("00001-of-00002.parquet", "00002-of-00002.parquet", MANIFEST):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "1/4")
    with pytest.raises(RunMismatchError, match="another of"):
        write(tmp_path, "1/3")
    with pytest.raises(RunMismatchError, match="another images, names"):
        write(tmp_path, "2/4", Numbered(99))


@pytest.mark.parametrize("text", ["", "0/4", "5/4", "1/0", "1", "a/b", "all", "-1/4", "1/100000", "1/4/4"])
def test_what_names_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no shard"):
        Shards.named(text)


def test_more_shards_than_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more shards than batches"):
        write(tmp_path, "1/14")
    assert write(tmp_path, "all/13").finished
    assert ds.dataset(tmp_path, format="parquet").count_rows() == 97


def test_the_command_embeds_tars_in_shards(tmp_path: Path) -> None:
    tars(tmp_path / "s", 3)
    pictures(tmp_path / "photos", 9)
    out, where = tmp_path / "vectors", f"{tmp_path}/s/photos-{{000..002}}.tar"
    words = ("embed", "selfmask/tiny", where, "--out", out, "--batch-size", "8")
    first = selfmask(*words, "--shard", "1/2", "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout) | {"seconds": 0} == {
        "out": str(out),
        "written": [1],
        "kept": [],
        "of": 2,
        "finished": False,
        "rows": 16,
        "bad": 0,
        "seconds": 0,
    }
    again = selfmask(*words, "--shard", "1/2")
    assert (again.returncode, "--resume" in again.stderr) == (2, True)
    rest = selfmask(*words, "--shard", "all/2", "--resume")
    assert "1 of 2 shards written" in rest.stdout
    assert "all shards are there" in rest.stdout
    one = selfmask(*words[:4], tmp_path / "one.parquet", *words[5:])
    assert one.returncode == 0
    assert ds.dataset(out, format="parquet").to_table().equals(pq.read_table(tmp_path / "one.parquet"))
    assert "a folder" in selfmask(*words[:4], tmp_path / "v.npz", "--shard", "1/2").stderr
    assert "--resume is for shards" in selfmask(*words, "--resume").stderr


@pytest.mark.parametrize("trouble", ["half", "403"])
def test_a_server_that_is_lost_half_way_loses_nothing_that_is_finished(
    tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_WAITS", (0.01,))
    monkeypatch.setattr(places, "_BLOCK", 4096)
    monkeypatch.setattr(features, "_PART", 8)
    monkeypatch.setenv("SELFMASK_CACHE", str(tmp_path / "cache"))
    with serving(tars(tmp_path / "s", 3)) as server:
        where = f"{server.url}/photos-{{000..002}}.tar"
        write(tmp_path / "whole", "all/2", open_images(where))
        monkeypatch.setattr(places, "_KEPT", Recent(0, len))  # as in a new process
        images = open_images(where)
        server.trouble["photos-002.tar"] = [trouble]
        with pytest.raises(DataUnavailableError, match=r"cannot read http.*photos-002.tar"):
            write(tmp_path / "cut", "all/2", images)
        server.trouble.clear()
        done = write(tmp_path / "cut", "all/2", open_images(where), resume=True)
        assert (done.kept, done.finished) == ([1], True)
    for name in ("00001-of-00002.parquet", "00002-of-00002.parquet", MANIFEST):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
