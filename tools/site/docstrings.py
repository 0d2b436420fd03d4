"""Our docstrings for mkdocstrings: lines such as `images: a folder` that explain parameters become a list of them."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Parameters(griffe.Extension):
    """Turns the explained parameters or fields of a docstring into a section."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        _arrange(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        _arrange(cls, set(cls.members))


def _arrange(object_: griffe.Object, names: set[str]) -> None:
    if object_.docstring is None:
        return
    # Examples stand between empty lines; in Markdown, >>> would be a quotation of a quotation of a quotation.
    said = re.sub(r"(?m)^((?:>>> .*|\.\.\. .*)(?:\n(?!$).*)*)", r"```pycon\n\1\n```", object_.docstring.value)
    object_.docstring.value = said
    before, section = list[str](), list[str]()
    for line in object_.docstring.value.splitlines():
        named = re.match(r"(\w+): ", line)
        if (named and named[1] in names) or (section and line.startswith("    ")):
            section.append(f"    {line}")
        elif section and not line.strip():
            continue
        else:
            before.append(line)
    if section:
        title = "Attributes" if object_.is_class else "Args"
        object_.docstring.value = "\n".join([*before, "", f"{title}:", *section])
