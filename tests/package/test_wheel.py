"""The wheel: what is in it, and that it works where nothing else of this folder is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from ..conftest import ROOT

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    # No isolation: that would download the build backend, which is here.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(list(out.glob("*.tar.gz"))) == 1
    (made,) = out.glob("*.whl")
    return made


def test_it_holds_all_that_the_code_needs_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = ROOT / "src"
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = {str(Path(name).relative_to("src")) for name in tracked.stdout.split()}
    assert all((sources / name).is_file() for name in expected)
    about = {name for name in names if ".dist-info/" in name}
    assert expected <= names
    assert {name for name in names - about if "__pycache__" not in name} == expected
    assert {Path(name).name for name in about} >= {"METADATA", "LICENSE", "NOTICE", "entry_points.txt"}
    assert wheel.stat().st_size < 10_000_000


def test_it_works_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """What it needs is that of this environment, since torch takes gigabytes; selfmask is that of the wheel."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q"]
    done = subprocess.run([*install, str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    own = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    # Behind its own packages; an editable install of this folder has no say, as .pth files there are not followed.
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=clean, timeout=3600)
        assert done.returncode in (0, 3), done.stderr  # two steps may well gain nothing
        return done.stdout

    assert str(own) in run(str(python), "-c", "import selfmask; print(selfmask.__file__)")
    selfmask = str(tmp_path / "env" / "bin" / "selfmask")
    run(selfmask, "demo", "--steps", "2", "--out", "demo")
    for name in ("mask.smn", "map.safetensors", "report.html", "result.json"):
        assert (tmp_path / "demo" / name).stat().st_size > 0
    assert "selfmask/tiny" in run(selfmask, "inspect", "demo/mask.smn")
