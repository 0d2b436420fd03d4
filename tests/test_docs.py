"""Every command and every piece of Python that README and docs show is run here."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[str]:
    """Indented lines that call make or selfmask, without their comments."""
    lines = re.findall(r"^    ((?:make|selfmask) .*)$", page.read_text(), flags=re.MULTILINE)
    return [line.partition("#")[0].strip() for line in lines]


def test_python_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True)


def test_commands_run(tmp_path: Path) -> None:
    """`make` commands are only checked to exist: they set up an environment, or call this test."""
    found = [command for page in PAGES for command in commands(page)]
    assert {"make demo", "make test"} <= set(found)
    subprocess.run([Path(sys.executable).with_name("selfmask"), "demo"], cwd=tmp_path, check=True)
    for command in found:
        program, *arguments = shlex.split(command)
        if program == "make":
            subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
        else:
            subprocess.run([Path(sys.executable).with_name(program), *arguments], cwd=tmp_path, check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
