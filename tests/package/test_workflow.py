"""The workflow: it cannot be run here, but what it installs must be what the tests need."""

from __future__ import annotations

import re
import tomllib

import yaml

from ..conftest import ROOT


def test_it_installs_what_the_tests_need() -> None:
    workflow = (ROOT / ".github/workflows/tests.yml").read_text()
    assert {"tests", "wheel"} <= set(yaml.safe_load(workflow)["jobs"])
    asked = [re.findall(r"-e '\.\[([\w,]+)\]'", text) for text in (workflow, (ROOT / "Makefile").read_text())]
    assert asked[0] == asked[1] != []


def test_the_readme_lists_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    readme = (ROOT / "README.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", readme.partition("| extra |")[2].partition("\n\n")[0], re.MULTILINE))
    assert listed == set(extras) - {"docs", "bench", "dev"}
