"""The server on a Ray cluster (`python -m benchmarks.serve_ray`), one of two nodes killed under load."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from selfmask.errors import ConfigError

from ..conftest import ROOT


@pytest.mark.heavy
def test_a_node_that_dies_takes_no_request_with_it_for_long() -> None:
    words = [sys.executable, "-m", "benchmarks.serve_ray", "--seconds", "4", "--masks", "4"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == 0
    assert found["before"].keys() == {"right"}
    assert found["replicas_before"] == 2
    assert found["after"]["right"] > found["after"].get("500", 0)
    assert found["good_at_the_end"]


@pytest.mark.heavy
def test_arguments_are_text_or_values() -> None:
    from selfmask.serving.ray import Served

    given = {"backbone": "resnet50", "masks": "m", "replicas": "3", "cpus": "2", "max_batch": "8", "max_body": "5M"}
    served = Served.of({**given, "max_wait_ms": 2.5, "pin": "a,b", "insecure": "true"})
    assert (served.replicas, served.cpus, served.config.workers) == (3, 2, 2)
    assert (served.config.max_batch, served.config.max_body, served.config.pin) == (8, "5M", ("a", "b"))
    assert served.config.insecure
    for wrong in ({"masks": "m"}, {**given, "max_batches": "8"}, {**given, "max_batch": "many"}):
        with pytest.raises(ConfigError):
            Served.of(wrong)


def test_nothing_else_needs_ray() -> None:
    package = ROOT / "src" / "selfmask"
    adapters = {package / "serving" / "ray.py", package / "commands" / "launch" / "by_ray.py"}
    files = [file for file in package.rglob("*.py") if file not in adapters]
    assert len(files) > 200
    importing = re.compile(r"^\s*(from ray\b|import ray\b|from \.ray import|from \.serving\.ray)", re.MULTILINE)
    assert [file.name for file in files if importing.search(file.read_text())] == []
