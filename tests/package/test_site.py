"""The site: built without a warning, notebooks run, links lead somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from selfmask.cli import VERBS

from ..conftest import ROOT

pytestmark = pytest.mark.heavy


class Page(HTMLParser):
    """The links, the names and the loaded things of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.names, self.loaded = list[str](), set[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attributes}
        self.names |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("link", "script", "img", "iframe") and given.get("rel") != "canonical":
            self.loaded.append(given.get("href") or given.get("src") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return out


def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {file.resolve(): Page(file.read_text()) for file in site.rglob("*.html") if file.name != "404.html"}
    assert len(pages) > 25
    for file, page in pages.items():
        assert not [each for each in page.loaded if each.startswith(("http", "//"))], file.name
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert target.exists(), f"{file.name}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].names, f"{file.name}: {link}"


def test_it_shows_every_command_and_the_results_of_notebooks(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text()
    assert all(f"selfmask {verb}" in commands for verb in VERBS)
    python = (site / "reference" / "python.html").read_text()
    assert all(name in python for name in ("get_masked_model", "save_pretrained", "push_to_hub", "HubAccessError"))
    assert "mask_bytes" in (site / "notebooks" / "own_images.html").read_text()
    assert "frozen + map" in (site / "notebooks" / "few_labels.html").read_text()
    assert "images indexed in clothes.index" in (site / "notebooks" / "search.html").read_text()
    assert "404 there is no" in (site / "notebooks" / "serving.html").read_text()
    assert "(600, ['name', 'vector'], True)" in (site / "notebooks" / "cluster.html").read_text()
