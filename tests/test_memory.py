"""Memory that stays with our own processes, and only with those: seen by the pages that they have to fetch."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import selfmask
from selfmask import adapt, cli, memory
from selfmask.commands.cascade import workers
from selfmask.embedding import embed

from .cli import inside
from .training.small import HOW, Clothes, config, network

# In a process of its own: what is set stays set, and one that has done much has room for everything.
FETCHED = """
import json, resource, sys
import numpy as np

def fetched():  # how many pages of a large block have to be fetched from the system: 64 if they are huge, else 32768
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

np.ones(1 << 24)
{first}
fetched()
print(json.dumps([{kept}, fetched(), fetched()]))
"""
KEEP = "from selfmask.memory import keep_memory"
COMMAND = """
import contextlib, io, runpy
sys.argv = ["selfmask", "--help"]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    runpy.run_module("selfmask", run_name="__main__", alter_sys=True)
"""


def run(first: str, kept: str = "None", **variables: str) -> tuple[Any, int]:
    """What a new process gets for `kept`, and how many pages it then fetches for a block that it had before."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    code = FETCHED.replace("{first}", first).replace("{kept}", kept)
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={**clean, **variables}
    )
    kept, *pages = json.loads(done.stdout.splitlines()[-1])
    return kept, max(pages)


def is_glibc() -> bool:
    return hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


glibc = pytest.mark.skipif(not is_glibc(), reason="another C library")


@glibc
def test_freed_memory_is_used_again() -> None:
    assert run(KEEP)[1] >= 64
    kept, pages = run(f"{KEEP}; kept = keep_memory()", "kept")
    assert kept is True
    assert pages < 32


@glibc
def test_the_process_of_a_command_keeps_its_memory() -> None:
    assert run(COMMAND)[1] < 32


@glibc
@pytest.mark.parametrize(
    "variable",
    [
        "MALLOC_TRIM_THRESHOLD_",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_MMAP_MAX_",
        "MALLOC_TOP_PAD_",
        "MALLOC_ARENA_MAX",
        "MALLOC_CONF",
    ],
)
def test_what_the_user_has_set_counts(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", refuse)
    monkeypatch.setenv(variable, "65536")
    assert memory.keep_memory() is False


@glibc
def test_the_tunables_of_malloc_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    tunables = "glibc.malloc.mmap_max=65536:glibc.malloc.trim_threshold=131072"
    kept, pages = run(f"{KEEP}; kept = keep_memory()", "kept", GLIBC_TUNABLES=tunables)
    assert (kept, pages >= 64) == (False, True)
    assert run(f"{KEEP}; kept = keep_memory()", "kept", GLIBC_TUNABLES="glibc.rtld.optional_static_tls=512")[0] is True


@glibc
def test_loops_of_others_can_do_so_by_the_environment() -> None:
    """As README.md says."""
    assert (
        "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647" in (Path(__file__).parents[1] / "README.md").read_text()
    )
    assert run("", MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="2147483647")[1] < 32


def test_elsewhere_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    for library in (lambda _: object(), no_library):
        monkeypatch.setattr(memory.ctypes, "CDLL", library)
        assert memory.keep_memory() is False


# ---- who may ---------------------------------------------------------------------------------------------------------


def refuse(*_: object) -> None:
    raise AssertionError("malloc was touched")


def no_library(_: object) -> None:
    raise TypeError


def test_what_is_called_from_other_processes_leaves_malloc_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", refuse)
    monkeypatch.setattr(cli, "keep_memory", refuse)
    embed(torch.nn.Flatten(), [image for image, _ in Clothes(3).items], HOW, batch_size=1)
    adapt(network(), Clothes(), config(steps=1), preprocessing=HOW)
    assert inside.selfmask("backbones", "selfmask/tiny").returncode == 0


def test_it_is_no_part_of_the_library() -> None:
    assert not hasattr(selfmask, "memory_kept")
    assert not {"keep_memory", "memory_kept"} & set(selfmask.__all__)


def test_the_command_is_what_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(cli, "keep_memory", lambda: called.append("keep"))
    monkeypatch.setattr(cli, "app", lambda: called.append("app"))
    cli.main()
    assert called == ["keep", "app"]
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"selfmask": "selfmask.cli:main"}


def test_processes_that_train_experts_keep_theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[object] = []
    monkeypatch.setattr(workers, "keep_memory", lambda: called.append("keep"))
    monkeypatch.setattr(workers, "train_expert", lambda _, index: called.append(index))
    monkeypatch.setattr(workers, "threading", SimpleNamespace(Thread=lambda **_: SimpleNamespace(start=lambda: None)))
    (tmp_path / "job").write_bytes(b"N.")  # a pickled None
    workers._train(str(tmp_path / "job"), str(tmp_path / "trouble"), 3, torch.get_num_threads(), os.getppid())
    assert called == ["keep", 3]
