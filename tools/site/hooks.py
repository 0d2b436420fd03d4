"""Pages of the site that are made of something else: of README and its like, the command line, the docstrings."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
os.environ["JUPYTER_PATH"] = str(Path(__file__).parent)  # where the kernel of the notebooks is
_HOW_TO = "How to"
_PYTHON = {
    "Adapting": ["selfmask.adapt", "selfmask.AdaptConfig", "selfmask.AdaptResult"],
    "Masks on a model": ["selfmask.get_masked_model", "selfmask.MaskedModel", "selfmask.MaskConfig"],
    "With labels": ["selfmask.train", "selfmask.TrainConfig", "selfmask.TrainResult", "selfmask.open_labelled"],
    "Cascades": ["selfmask.fit_cascade", "selfmask.CascadeConfig", "selfmask.Cascade"],
    "Vectors": ["selfmask.FeatureMap", "selfmask.backbones.load_backbone"],
    "Errors": ["selfmask.errors"],
}


def on_config(config: Any) -> Any:
    """A page that nobody put in its place is found at the end of the how-tos."""
    named = set(re.findall(r"[\w/]+\.(?:md|ipynb)", str(config.nav)))
    (how_to,) = (part[_HOW_TO] for part in config.nav if _HOW_TO in part)
    for page in sorted(Path(config.docs_dir).glob("*.md")):
        if page.name not in named:
            title = page.read_text().partition("\n")[0].lstrip("# ").replace("`", "")
            how_to.append({title: page.name})
    return config


def on_files(files: Files, config: Any) -> Files:
    made = {
        "index.md": _moved((ROOT / "README.md").read_text()),
        "contributing.md": _moved((ROOT / "CONTRIBUTING.md").read_text()),
        "changelog.md": _moved((ROOT / "CHANGELOG.md").read_text()),
        "reference/python.md": _python(),
        "reference/commands.md": _commands(),
    }
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Of a study, the site has the one page and not its Markdown, which would take the same place."""
    if page.file.src_uri != "results/README.md":
        return markdown
    return re.sub(r"\]\(([\w-]+)\.md\)", r"](\1.html)", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Links in notebooks are to the sources of pages, as everywhere; only of Markdown does mkdocs see to that."""
    return re.sub(r'(href="[\w./-]+)\.md(["#])', r"\1.html\2", html) if page.file.src_uri.endswith(".ipynb") else html


def _moved(text: str) -> str:
    """Links of a page of the repository, as they are on the site."""
    text = text.replace("](docs/", "](").replace("](SECURITY.md)", "](security.md)")
    return text.replace("](CHANGELOG.md)", "](changelog.md)").replace("](CONTRIBUTING.md)", "](contributing.md)")


def _python() -> str:
    parts = ["# Python", "Everything here can be imported from `selfmask`, but where another package is named."]
    for title, names in _PYTHON.items():
        parts += [f"## {title}", *(f"::: {name}\n    options:\n      heading_level: 3" for name in names)]
    return "\n\n".join(parts) + "\n"


def _commands() -> str:
    """What `--help` says, command by command, from the commands themselves."""
    import typer
    from typer.cli import get_docs_for_click

    from selfmask.cli import VERBS, load

    parts = ["# The command line", "Every command has `--help`. What it prints is below."]
    for verb in VERBS:
        command = load(verb)
        text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name=verb), name=f"selfmask {verb}")
        parts.append(re.sub(r"^#", "##", text, flags=re.MULTILINE))
    return "\n\n".join(parts)
