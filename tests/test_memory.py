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
import torchvision  # noqa: F401 - before tests that let no library be loaded

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
@pytest.mark.heavy
def test_freed_memory_is_used_again() -> None:
    assert run(KEEP)[1] >= 64
    kept, pages = run(f"{KEEP}; kept = keep_memory()", "kept")
    assert kept is True
    assert pages < 32


@pytest.mark.heavy
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
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)  # what ends is a process of its own, not that of tests
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
    monkeypatch.setattr(workers, "share_memory", lambda number: called.append(f"one of {number}"))
    workers._train(str(tmp_path / "job"), str(tmp_path / "trouble"), 3, 2, torch.get_num_threads(), os.getppid())
    assert called == ["keep", "one of 2", 3]


# ---- how much a process may use ------------------------------------------------------------------------------------

PLENTY = 1 << 40


def system(root: Path, lines: str, groups: dict[str, dict[str, str]]) -> Path:
    """A root with what Linux says of control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for group, files in groups.items():
        place = root / "sys/fs/cgroup" / group
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / f"memory.{name}").write_text(text + "\n")
    return root


def group(limit: str, used: int, high: str = "max") -> dict[str, str]:
    """Of version 2; 300 of what is used are cached files."""
    return {"max": limit, "high": high, "current": str(used), "stat": "anon 4\ninactive_file 300"}


def old_group(limit: int, used: int, above: int = 1 << 62) -> dict[str, str]:
    """Of version 1."""
    stat = f"inactive_file 7\nhierarchical_memory_limit {above}\ntotal_inactive_file 300"
    return {"limit_in_bytes": str(limit), "usage_in_bytes": str(used), "stat": stat}


NESTED = "0::/jobs/7/step\n"
OLD = "5:devices:/\n4:cpu,memory:/jobs/7\n0::/\n"
BUDGETS = {
    "no groups": ("", {}, PLENTY),
    "no limit": ("0::/\n", {"": group("max", 700)}, PLENTY),
    "a container": ("0::/\n", {"": group("1000", 700)}, 600),
    "used up": ("0::/\n", {"": group("1000", 1500)}, 0),
    "a limit that slows down": ("0::/\n", {"": group("5000", 700, high="900")}, 500),
    "the innermost": (NESTED, {"": {}, "jobs": group("9000", 700), "jobs/7/step": group("1000", 700)}, 600),
    "one above": (
        NESTED,
        {"jobs": group("2000", 900), "jobs/7": group("max", 800), "jobs/7/step": group("max", 7)},
        1400,
    ),
    "the outermost, by what others use": (
        NESTED,
        {"jobs": group("9000", 9000), "jobs/7/step": group("1000", 400)},
        300,
    ),
    "a path that is not seen from inside": ("0::/docker/abc\n", {"": group("1000", 700)}, 600),
    "a path out of the namespace": ("0::/../../other\n", {"": group("1000", 700)}, 600),
    "version 1": (OLD, {"memory/jobs/7": old_group(1000, 700)}, 600),
    "version 1, one above": (OLD, {"memory/jobs": old_group(800, 700), "memory/jobs/7": old_group(1 << 62, 600)}, 400),
    "version 1, one above that is not seen": (OLD, {"memory/jobs/7": old_group(1 << 62, 700, above=1000)}, 600),
    "version 1 in a container": (OLD, {"memory": old_group(1000, 700)}, 600),
    "nonsense": ("what?\n", {"": {"max": "?", "current": "x", "stat": "y"}}, PLENTY),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_every_group_above_counts(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    lines, groups, left = BUDGETS[case]
    assert memory.memory_budget(PLENTY, system(tmp_path, lines, groups)) == left // 2


def test_memory_is_divided_among_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = system(tmp_path, "0::/\n", {"": group("1500", 600)})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory.memory_budget(PLENTY, root) == 300
    monkeypatch.setattr(memory, "_sharing", 1)
    memory.share_memory(3)
    assert memory.memory_budget(PLENTY, root) == 100
    assert memory.memory_budget(120, root) == 10


def test_this_machine_has_some() -> None:
    assert memory.memory_budget(PLENTY) > 10_000_000
