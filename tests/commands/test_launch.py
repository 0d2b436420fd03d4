"""Shards as jobs of submitit: what is finished is kept, and the rest done, whatever happened to a job."""

import json
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from selfmask.commands.launch import job_options
from selfmask.errors import ConfigError

from ..cli.inside import selfmask
from ..data.shards import shards


@pytest.mark.heavy
def test_shards_as_local_jobs_are_the_vectors_of_one_process(tmp_path: Path) -> None:
    shards(tmp_path / "s", 3)
    words = ("embed", "selfmask/tiny", tmp_path / "s", "--batch-size", "8", "--out")
    done = selfmask(*words, tmp_path / "v", "--shard", "all/2", "--launch", "local", "--job-option", "timeout_min=10")
    assert done.returncode == 0, done.stderr
    assert "2 jobs were given to local" in done.stdout
    assert "all shards are there" in done.stdout
    assert selfmask(*words, tmp_path / "one.parquet").returncode == 0
    assert ds.dataset(tmp_path / "v", format="parquet").to_table().equals(pq.read_table(tmp_path / "one.parquet"))
    whole = (tmp_path / "v" / "00001-of-00002.parquet").read_bytes()
    (tmp_path / "v" / "00001-of-00002.parquet").write_bytes(whole[:100])  # as a job that lost its disk
    again = selfmask(*words, tmp_path / "v", "--shard=all/2", "--launch=local", "--json")
    assert json.loads(again.stdout)["kept"] == [1, 2]
    assert (tmp_path / "v" / "00001-of-00002.parquet").read_bytes() == whole
    (tmp_path / "s" / "photos-001.tar").unlink()  # jobs and this process would now see other images
    failed = selfmask(*words, tmp_path / "v", "--shard", "all/2", "--launch", "local")
    assert failed.returncode != 0
    assert "2 of 2 jobs failed" in failed.stderr
    assert "_jobs" in failed.stderr


def test_launch_is_for_shards_and_for_engines_that_are_there(tmp_path: Path) -> None:
    shards(tmp_path / "s", 1)
    words = ("embed", "selfmask/tiny", tmp_path / "s", "--batch-size", "8", "--out", tmp_path / "v", "--launch")
    assert "--launch is for shards" in selfmask(*words, "local").stderr
    slurm = selfmask(*words, "slurm", "--shard", "all/1")
    assert slurm.returncode == 2
    assert "cannot launch jobs with slurm" in slurm.stderr


def test_options_of_jobs() -> None:
    assert job_options(["slurm_partition=gpu", "timeout_min=60"]) == {"slurm_partition": "gpu", "timeout_min": 60}
    for odd in ("x", "=3", "a b=3"):
        with pytest.raises(ConfigError, match="--job-option"):
            job_options([odd])
