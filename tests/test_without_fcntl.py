"""Where there is no `fcntl`, as on Windows: shown by hiding it from Python and from all processes that it starts.

What Windows has in its place for locks, `msvcrt.locking`, is stood in for by `os.lockf`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

HIDING = """
import os, subprocess, sys, types  # subprocess first: by msvcrt it tells that it is on Windows

def locking(descriptor, mode, count):
    os.lockf(descriptor, os.F_TLOCK, 0)

sys.modules["fcntl"] = None
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
"""
SAMPLE = [
    "tests/maskfile/test_container.py",
    "tests/masking/test_rules.py",
    "tests/settings",
    "tests/training/test_folder.py",
    "tests/hub/test_shell.py::test_a_run_is_pushed_at_its_end",
]


def without_fcntl(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=3600,
    )


def test_everything_is_imported(tmp_path: Path) -> None:
    files = (ROOT / "src").rglob("*.py")
    names = [".".join(file.relative_to(ROOT / "src").with_suffix("").parts) for file in files]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    code = f"""
import importlib, sys
for name in {sorted(names)!r}:
    importlib.import_module(name)
try:
    import fcntl
except ImportError:
    print("all without it")
"""
    done = without_fcntl(tmp_path, "-c", code)
    assert done.stdout == "all without it\n", done.stderr


@pytest.mark.heavy
def test_a_sample_of_tests_passes(tmp_path: Path) -> None:
    done = without_fcntl(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not heavy", *SAMPLE)
    assert done.returncode == 0, done.stdout
    assert "[100%]" in done.stdout
