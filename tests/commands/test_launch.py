"""Commands as jobs: what is finished is kept, and the rest done, whatever happened to a job."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from benchmarks.fanout import WORKS, Work, fanned, on_ray, prepared, time_over_and_killed

from selfmask.commands.launch.run import job_options
from selfmask.errors import ConfigError

from ..cli.inside import selfmask
from ..data.shards import shards

EMBED, STUDY, CASCADE = WORKS


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("place"), 400)


@pytest.mark.heavy
def test_shards_as_local_jobs_are_the_vectors_of_one_process(tmp_path: Path) -> None:
    shards(tmp_path / "s", 3)
    words = ("embed", "selfmask/tiny", tmp_path / "s", "--batch-size", "8", "--out")
    done = selfmask(*words, tmp_path / "v", "--shard", "all/2", "--launch", "local", "--job-option", "timeout_min=10")
    assert done.returncode == 0, done.stderr
    assert "2 jobs for local" in done.stdout
    assert "2 of 2 shards written" in done.stdout
    assert "all shards are there" in done.stdout
    assert selfmask(*words, tmp_path / "one.parquet").returncode == 0
    assert ds.dataset(tmp_path / "v", format="parquet").to_table().equals(pq.read_table(tmp_path / "one.parquet"))
    whole = (tmp_path / "v" / "00001-of-00002.parquet").read_bytes()
    (tmp_path / "v" / "00001-of-00002.parquet").write_bytes(whole[:100])  # as a job that lost its disk
    again = selfmask(*words, tmp_path / "v", "--shard=all/2", "--launch=local", "--json")
    assert json.loads(again.stdout)["kept"] == [1, 2]
    assert "1 job for local" in again.stderr
    assert (tmp_path / "v" / "00001-of-00002.parquet").read_bytes() == whole
    (tmp_path / "s" / "photos-001.tar").unlink()  # jobs and this process would now see other images
    failed = selfmask(*words, tmp_path / "v", "--shard", "all/2", "--launch", "local")
    assert failed.returncode != 0
    assert "shards of something else" in failed.stderr
    assert "jobs for" not in failed.stdout  # none is missing


@pytest.mark.heavy
@pytest.mark.parametrize("work", [STUDY, CASCADE], ids=lambda work: work.name)
def test_local_jobs_that_are_stopped_or_killed_end_in_the_files_of_one_process(place: Path, work: Work) -> None:
    found = fanned(place, work, "local", trouble=time_over_and_killed)
    assert found.fine, found
    assert found.happened == "time over, another killed"
    assert found.again == 1  # of a job that was killed, submitit knows no more than that
    logs = "".join(file.read_text() for file in (place / "local" / work.name / "jobs").glob("*_log.out"))
    assert "Requeued job" in logs
    if work is CASCADE:  # an expert learns for as long as its job runs; cells of studies measure, too
        assert "finishing this step, then saving" in logs


@pytest.mark.heavy
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_a_node_of_ray_that_is_lost_takes_nothing_with_it(place: Path, work: Work) -> None:
    (found,) = on_ray(place, (work,))
    assert found.fine, found
    assert found.again == 0  # Ray itself begins jobs again
    assert ", 1 of " in found.happened


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_job_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not the cluster of another test, which may be about to be killed
    shards(tmp_path / "s", 3)
    words = ("embed", "selfmask/tiny", tmp_path / "s", "--batch-size", "8", "--shard", "all/3", "--launch", engine)
    partial = tmp_path / "v" / "_partial"
    partial.mkdir(parents=True)
    (partial / "00002-of-00003").write_text("in the way")
    failed = selfmask(*words, "--out", tmp_path / "v")
    assert failed.returncode == 2
    assert "1 of 3 jobs failed" in failed.stderr
    assert "--shard 2/3" in failed.stderr
    assert "error: " in failed.stderr.partition("\n")[2]  # what the job itself said
    assert "_jobs" in failed.stderr
    there = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "v").glob("*.parquet")}
    assert sorted(there) == ["00001-of-00003.parquet", "00003-of-00003.parquet"]
    (partial / "00002-of-00003").unlink()
    assert selfmask(*words, "--out", tmp_path / "v").returncode == 0
    assert {name: (tmp_path / "v" / name).stat().st_mtime_ns for name in there} == there
    assert selfmask(*words[:-2], "--out", tmp_path / "one").returncode == 0
    for file in (tmp_path / "one").glob("*.parquet"):
        assert file.read_bytes() == (tmp_path / "v" / file.name).read_bytes()


def test_launch_is_for_shards_and_for_engines_that_are_there(tmp_path: Path) -> None:
    shards(tmp_path / "s", 1)
    words = ("embed", "selfmask/tiny", tmp_path / "s", "--batch-size", "8", "--out", tmp_path / "v", "--launch")
    assert "--launch is for shards" in selfmask(*words, "local").stderr
    for engine, option in (("slurm", "timeout_min=x"), ("ray", "no_such_option=1"), ("local", "no_such_option=1")):
        found = selfmask(*words, engine, "--shard", "all/1", "--job-option", option)
        assert found.returncode == 2
        assert f"cannot launch jobs with {engine}" in found.stderr


def test_options_that_contradict_each_other(tmp_path: Path) -> None:
    found = selfmask("study", "rules", "--launch", "local", "--out", tmp_path / "s")
    assert found.returncode == 2
    assert "--shard all/N" in found.stderr
    assert not (tmp_path / "s").exists()


def test_options_of_jobs() -> None:
    words = ["slurm_partition=gpu", "timeout_min=60", "num_gpus=0.5", "name=1.", "address=10.0.0.1:6379"]
    found = {"slurm_partition": "gpu", "timeout_min": 60, "num_gpus": 0.5, "name": "1.", "address": "10.0.0.1:6379"}
    assert job_options(words) == found
    for odd in ("x", "=3", "a b=3"):
        with pytest.raises(ConfigError, match="--job-option"):
            job_options([odd])


SLURM_SAYS = """
import signal, sys
from selfmask.commands.launch.job import Job

job = Job(tuple(sys.argv[1:]), ".")

def over(*_):
    again = job.checkpoint().function
    sys.exit(0 if (again.words, again.folder) == (job.words, job.folder) else 1)

signal.signal(signal.SIGUSR2, over)
job()
"""


@pytest.mark.heavy
def test_a_job_whose_time_is_over_saves_first(tmp_path: Path) -> None:
    """As submitit does it on Slurm, which tells all processes of the job."""
    words = ("adapt", "selfmask/fashion", "--backbone", "selfmask/tiny", "--steps", "9999", "--most-images", "100")
    words += ("--batch-size", "8", "--log-every", "1", "--out", "run")
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen([sys.executable, "-c", SLURM_SAYS, *words], cwd=tmp_path, stdout=log, stderr=log)
    try:
        until, steps = time.monotonic() + 120, tmp_path / "run/log.jsonl"
        while not (steps.exists() and steps.stat().st_size) and time.monotonic() < until:
            time.sleep(0.1)
        for each in [*psutil.Process(job.pid).children(), psutil.Process(job.pid)]:
            each.send_signal(signal.SIGUSR2)
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.wait()
    assert "everything is saved" in (tmp_path / "log").read_text()
    assert (tmp_path / "run/checkpoints/last.pt").exists()


def test_what_waits_for_a_job_needs_little_memory() -> None:
    """On every node, beside each job: torch alone would take half a gigabyte."""
    code = "import sys, selfmask.commands.launch.job; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_job_ends_with_the_process_that_runs_it(tmp_path: Path) -> None:
    """However that ended: what it leaves behind would be in the way of the job that takes its place."""
    words = ("adapt", "selfmask/fashion", "--backbone", "selfmask/tiny", "--steps", "99999", "--out", "run")
    code = f"from selfmask.commands.launch.job import Job; Job({words!r}, '.')()"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    children: list[psutil.Process] = []
    try:
        until = time.monotonic() + 60
        while not children and time.monotonic() < until:
            children = psutil.Process(parent.pid).children()
            time.sleep(0.01)
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs(children, 30)
    finally:
        for each in children:
            if each.is_running():
                each.kill()
    assert children
    assert not alive
